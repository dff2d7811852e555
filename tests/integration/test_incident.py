"""docs/INCIDENT.md: an operator finds and releases the locks of a killed worker and of a hung body, in the example project.

With `INCIDENT_WRITE=1`, the test writes what the commands print into the page.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from celery_singleton_lock import locks
from tests.servers import Process, RedisServer, free_port, is_listening, until

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "INCIDENT.md"
BLOCK = re.compile(r"(?<=<!-- transcript -->\n```console\n).*?(?=```\n<!-- /transcript -->)", re.DOTALL)
TASKS = "example_project.tasks"
#: What differs from run to run, and what stands for it.
VARYING = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d": "TIME",
    r"(pid'?:?) \d+": r"\1 N",
    r"\b(\d+\.\d s|\d+\.\ds|\d+m\d+s|\d+[ms])\b": "N s",
    r"(?<=@demo) +\d+": " N",
    r" +": " ",
}


class Incident:
    """Two workers and an exporter of the example project, and what an operator's shell does."""

    def __init__(self, server: RedisServer, directory: Path, ends: contextlib.ExitStack) -> None:
        own = {"TMPDIR": str(directory), "PYTHONPATH": str(PROJECT), "EXAMPLE_REDIS_URL": server.url()}
        self._environment = {**os.environ, **own, "NO_COLOR": "1"}
        self._directory, self._ends = directory, ends
        self._port = free_port()
        self.app = Celery("operator", broker=server.url(), set_as_current=False)
        self.app.conf.broker_transport_options = {"global_keyprefix": "example_project:"}
        self._start("exporter", "singleton", "exporter", "--listen", f"127.0.0.1:{self._port}")

    def _celery(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "celery", "--workdir", str(self._directory), "-A", "example_project", *words]

    def _start(self, name: str, *words: str) -> Process:
        process = Process(self._celery(*words), self._directory / f"{name}.log", self._environment)
        process.start()
        self._ends.callback(process.kill)
        return process

    def _worker_with(self, name: str, task: str, task_id: str, *args: str) -> tuple[Process, int]:
        """Start a worker that runs a task; return it, and the process of the body."""
        worker = self._start(name, "worker", "-n", f"{name}@demo", "--concurrency", "1")
        until(lambda: self.app.control.ping([f"{name}@demo"], timeout=0.5), f"{name} answers", 30)
        headers = {"singleton_lock_options": {"lock_ttl": 60.0}}
        self.app.send_task(f"{TASKS}.{task}", args, task_id=task_id, headers=headers)
        (lock,) = until(lambda: locks.show(self.app, task_id), f"{task} runs", 30)
        assert f"{name}@demo" == lock.holder.node
        return worker, lock.holder.pid

    def begin(self) -> None:
        """Let the machine of worker two die, and the process of a body of worker one hang."""
        worker, _ = self._worker_with("two", "import_rates", "import-1")
        worker.signal(signal.SIGKILL)
        _, self._hung = self._worker_with("one", "monthly_report", "report-2026-10", "2026-10")
        os.kill(self._hung, signal.SIGSTOP)
        until(lambda: is_listening(self._port), "the exporter listens", 30)

    def end(self) -> None:
        """Kill the hung process, and wait until both tasks have run again."""
        os.kill(self._hung, signal.SIGKILL)
        for task in ("import_rates", "monthly_report"):
            until(lambda name=f"{TASKS}.{task}": self._ended(name) == "success", f"{task} has run again", 60)  # type: ignore[misc]

    def _ended(self, task: str) -> str:
        runs = locks.history(self.app, task)
        return runs[0].outcome if runs else ""

    def run(self, line: str) -> str:
        """Run a line of the page; return what it prints."""
        program = " ".join(self._celery()[:-2])
        curl = f"{sys.executable} -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())' "
        line = line.replace("celery -A", f"{program} -A").replace("curl -s ", curl)
        line = line.replace("127.0.0.1:9809", f"127.0.0.1:{self._port}")
        done = subprocess.run(
            line, shell=True, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout


@pytest.fixture
def incident(tmp_path: Path) -> Iterator[Incident]:
    """Yield an incident that has not begun."""
    with RedisServer() as server, contextlib.ExitStack() as ends:
        yield Incident(server, tmp_path, ends)


@pytest.mark.timeout(240)
def test_transcript(incident: Incident) -> None:
    """The commands of the page print what it says, but for times, durations and process ids."""
    page = PAGE.read_text(encoding="utf-8")
    (expected,) = BLOCK.findall(page)
    printed, events = [], iter((incident.begin, lambda: None, lambda: None, incident.end))
    for line in expected.splitlines():
        if line.startswith("# "):
            next(events)()
            printed.append(f"{line}\n")
        elif line.startswith("$ "):
            printed.append(f"{line}\n{incident.run(line[2:])}")
    if os.environ.get("INCIDENT_WRITE"):
        PAGE.write_text(BLOCK.sub(lambda _: "".join(printed), page), encoding="utf-8")
    else:
        assert plain(expected) == plain("".join(printed))


def plain(transcript: str) -> str:
    """Return a transcript without what varies."""
    for pattern, text in VARYING.items():
        transcript = re.sub(pattern, text, transcript)
    return "\n".join(line.rstrip() for line in transcript.splitlines())
