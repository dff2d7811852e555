"""Runs the demo: starts servers and workers, sends work, kills a worker, reports, and stops everything."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from uuid import uuid4

from example_project import ledger, redis_server, report, story, timeline
from example_project.constants import LEDGER_VARIABLE, PREFIX_VARIABLE, REDIS_URL_VARIABLE
from example_project.display import Display
from example_project.interrupts import pause
from example_project.processes import WORKERS, Fleet, node, wait_until
from example_project.reaper import Reaper
from example_project.traffic import Traffic

BEATS = ("beat-1", "beat-2")
#: Seconds that the workers get to finish after the last task was sent.
DRAIN = 25.0
#: Seconds between two checks of keys and clocks, and between two updates of the screen.
TICK, FRAME = 0.02, 0.5


@dataclass(frozen=True)
class Options:
    """The command line: work is sent for `seconds`; if `redis_url` is None, the demo starts a server of its own."""

    seconds: float
    kill: bool
    keep: bool
    timeline: Path
    redis_url: str | None = None


class Demo:
    """One run of the demo, in its own working directory."""

    def __init__(self, options: Options, directory: Path, screen: Display) -> None:
        """Take the options, an empty directory and a display."""
        self._options, self._screen = options, screen
        self.url = options.redis_url or redis_server.url(directory)
        self.prefix = f"example_project:{uuid4().hex[:8]}:"
        environment = {
            REDIS_URL_VARIABLE: self.url,
            PREFIX_VARIABLE: self.prefix,
            LEDGER_VARIABLE: str(directory / "ledger.sqlite3"),
        }
        os.environ.update(environment)
        self.fleet = Fleet(directory, environment, options.keep)
        self._directory = directory

    def run(self) -> int:
        """Run to the end and return the exit code: 0, or 1 if a promise was broken."""
        self._start()
        traffic = Traffic(self._options.seconds)
        started = monotonic()
        with redis_server.client(self.url) as redis:
            reaper = Reaper(self.fleet, redis, started, min(8.0, self._options.seconds * 0.3), self._screen.say)
            self._go_on(traffic, reaper, started)
        missing = traffic.missing()
        self.fleet.stop(*BEATS, *WORKERS)
        return self._conclude(self._story(started, reaper), missing)

    def _start(self) -> None:
        if self._options.redis_url is None:
            self.fleet.start("redis", redis_server.command(redis_server.find(), self._directory))
        wait_until(lambda: redis_server.answers(self.url), 10, "the Redis server")
        ledger.create()
        self._screen.say(f"starting {', '.join(WORKERS)} workers and {len(BEATS)} beats")
        for worker in WORKERS:
            self.fleet.start_worker(worker)
        wait_until(self._all_ready, 60, "the workers")
        for beat in BEATS:
            self.fleet.start_beat(beat)

    def _all_ready(self) -> bool:
        self.fleet.check()
        return ledger.number("SELECT count(*) FROM events WHERE kind = 'ready'") >= len(WORKERS)

    def _go_on(self, traffic: Traffic, reaper: Reaper, started: float) -> None:
        seconds, frame, beating = self._options.seconds, 0.0, True
        while (elapsed := monotonic() - started) < seconds + DRAIN:
            traffic.tick(elapsed)
            if self._options.kill:
                reaper.tick(elapsed)
            if elapsed >= frame:
                frame = elapsed + FRAME
                self.fleet.check()
                now = self._story(started, reaper)
                self._screen.show(now, seconds)
                # On a busy machine, beat sends its first import late.
                done = elapsed >= seconds and report.imported(now) and (not self._options.kill or reaper.settled())
                if done and beating:
                    self.fleet.stop(*BEATS)
                    beating = False
                elif done and traffic.settled() and not now.unfinished():
                    return
            pause(TICK)

    def _story(self, started: float, reaper: Reaper) -> story.Story:
        nodes = tuple(node(worker) for worker in WORKERS)
        return story.Story(monotonic() - started, nodes, story.runs(started), story.events(started), reaper.kill)

    def _conclude(self, outcome: story.Story, missing: list[str]) -> int:
        self._options.timeline.write_text(timeline.render(outcome), encoding="utf-8")
        self._screen.close()
        self._screen.table(report.HEADINGS, report.table(outcome))
        for line in report.takeover_lines(outcome):
            self._screen.say(line)
        faults = report.faults(outcome, self._options.kill) + missing
        for fault in faults:
            self._screen.say(f"FAULT {fault}")
        self._screen.say(f"timeline: {self._options.timeline}")
        self._screen.say("FAILED" if faults else "no overlap, and all work that was sent is done")
        return 1 if faults else 0


def run(options: Options, screen: Display) -> int:
    """Run the demo. However it ends, no process, file or key is left behind."""
    with _directory(options.keep, screen) as directory:
        demo = Demo(options, directory, screen)
        try:
            return demo.run()
        finally:
            screen.close()
            gc.collect()  # a result calls Redis when it is deleted, so delete all while the server still runs
            demo.fleet.close()
            if options.redis_url:
                redis_server.forget(options.redis_url, demo.prefix)


@contextmanager
def _directory(keep: bool, screen: Display) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="example_project-"))
    try:
        yield directory
    finally:
        if keep:
            screen.say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
