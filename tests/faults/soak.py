"""Faults at random under load: ``python -m tests.faults.soak --minutes 20 --seed 1`` prints a report, and fails on a violation.

The seed and the minutes decide which faults come, in which order, after which pauses, for how long, and to which worker; how
far processes have come by then, and so which of a worker's children is at work, they cannot decide.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from celery_singleton_lock import locks
from tests.faults.checker import bodies_of, figures, table, unfinished
from tests.faults.counters import disagreements
from tests.faults.harness import WorkerEnvironment
from tests.faults.ledger import Event
from tests.servers import RabbitMQServer, ServerMissing, until

TTL = 4.0
POOLS = ("prefork", "threads", "gevent", "prefork")
CONCURRENCY = 3
#: Seconds within which a worker must start a body.
PATIENCE = 60.0


class Work(NamedTuple):
    """One kind of work.

    Arguments:
        name: of its task.
        expect: how often its messages are expected to run.
        weight: how often it is chosen, in relation to others.
        tags: how many lock keys it has.
        burst: how many messages are sent at once at most, so that lines form and limits are reached.
        long: how many of its bodies, of 1, last two TTLs unless their lease is lost; the others last up to a second.
    """

    name: str
    expect: str
    weight: int
    tags: int = 6
    burst: int = 1
    long: float = 0.05


WORK = (
    Work("late", "once in peace", 3),
    Work("skip", "decided in peace", 3),
    Work("late-wait", "once in peace", 2, tags=3, burst=3),
    Work("wait", "once unless killed", 2, tags=3, burst=3),
    Work("late-once-more", "run after", 2, tags=2),
    Work("late-latest", "run after", 2, tags=2),
    Work("late-replace", "run after", 2, tags=2),
    Work("late-join", "decided in peace", 2, tags=2),
    Work("late-raise", "decided in peace", 2, tags=2),
    Work("late-quiet", "run after", 2, tags=2),
    Work("late-least", "once in peace", 2, tags=2, burst=2),
    Work("late-most", "once in peace", 2, tags=2, long=0.5),
    Work("late-starts", "decided in peace", 2, tags=2),
    Work("late-publish-wait", "once in peace", 1, tags=2, burst=3),
    Work("late-publish-once-more", "run after", 2, tags=2),
    Work("late-publish-latest", "run after", 2, tags=2),
    Work("late-publish-replace", "run after", 2, tags=2),
    Work("late-publish-join", "decided in peace", 2, tags=2),
    Work("late-limit", "once in peace", 2, tags=1, burst=5),
    Work("late-limit-wait", "once in peace", 2, tags=1, burst=5),
    Work("publish-limit", "once unless killed", 1, tags=1, burst=4),
    Work("publish-limit-wait", "once unless killed", 1, tags=1, burst=4),
    Work("publish", "decided in peace", 2, tags=3),
    Work("publish-wait", "once unless killed", 2, tags=3, burst=2),
)
#: Seconds for which a message that has not started keeps its lock; a kill can lose it.
QUEUED = 30.0
#: Kinds of faults, with the minimum and maximum of their length in seconds.
SPANS = {
    "child killed": (0.0, 0.0),
    "worker killed": (0.0, 0.0),
    "worker stopped": (TTL / 2, TTL * 5 / 2),
    "child stopped": (TTL * 2, TTL * 2),
    "store paused, short": (TTL / 2, TTL / 2),
    "store paused, long": (TTL * 2, TTL * 2),
    "store lost its data": (0.0, 1.0),
    "scripts flushed": (0.0, 0.0),
    "connections killed": (0.0, 0.0),
    "half-open": (TTL / 2, TTL / 2),
}


@dataclass(frozen=True)
class Planned:
    """A planned fault.

    Arguments:
        after: seconds of work before it.
        kind: one of ``SPANS``.
        who: index of the worker in the env's list, or among those with children if the fault hits a child.
        span: seconds that it lasts.
    """

    after: float
    kind: str
    who: int
    span: float


def plan(seed: int, seconds: float) -> list[Planned]:
    """Return the faults that fit into the seconds of a run, without the time that it takes to cause them."""
    draw, planned, left = random.Random(f"faults {seed}"), [], seconds
    while True:
        after, kind, who = draw.uniform(2, 6), draw.choice(list(SPANS)), draw.randrange(len(POOLS))
        fault = Planned(after, kind, who, draw.uniform(*SPANS[kind]))
        left -= fault.after + fault.span
        if left < 0:
            return planned
        planned.append(fault)


class Soak:
    """One run under load.

    Args:
        env: where it runs.
        seed: of all choices. Work has its own generator, because the amount of work depends on the machine.
        seconds: for which new work and new faults come, at least.
        clock: returns the time in seconds.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        env: WorkerEnvironment,
        seed: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._env = env
        self._plan = plan(seed, seconds)
        self._draw = random.Random(f"work {seed}")
        self._clock = clock
        self._sleep = sleep
        self.done: list[Planned] = []
        self._faults: dict[str, Callable[[Planned], None]] = {
            "child killed": self._kill_child,
            "worker killed": self._kill_worker,
            "worker stopped": self._stop_worker,
            "child stopped": self._stop_child,
            "store paused, short": lambda fault: self._pause_store("pause", fault),
            "store paused, long": lambda fault: self._pause_store("outage", fault),
            "store lost its data": self._empty_store,
            "scripts flushed": lambda fault: self._command("SCRIPT", "FLUSH"),
            "connections killed": lambda fault: self._env.kill_connections(),
            "half-open": self._half_open,
        }

    def run(self) -> None:
        """Send work, and cause all planned faults."""
        for pool in POOLS:
            self._env.start(pool, CONCURRENCY)
        for worker in self._env.workers:
            worker.ready(self._env.app)
        for fault in self._plan:
            self._wait(fault.after)
            self._faults[fault.kind](fault)
            self.done.append(fault)

    def _wait(self, seconds: float) -> None:
        """Send work for some seconds."""
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0:
            self._work()
            self._sleep(min(left, self._draw.uniform(0.05, 0.4)))

    def _work(self) -> None:
        (work,) = self._draw.choices(WORK, [work.weight for work in WORK])
        tag = f"tag{self._draw.randrange(work.tags)}"
        for _ in range(self._draw.randint(1, work.burst)):
            act = ["heed", 2 * TTL if self._draw.random() < work.long else round(self._draw.uniform(0.05, 1.0), 2)]
            self._env.send(work.name, tag, act, expect=work.expect)

    def finish(self, timeout: float) -> None:
        """Wait until all expected runs are done, all skippable messages are decided, and no lease is left."""

        def missing() -> bool:
            events = self._env.ledger.events()
            return bool(unfinished(events, bodies_of(events), self._env.schedule))

        deadline = time.monotonic() + timeout
        while missing() and time.monotonic() < deadline:
            time.sleep(1.0)
        until(lambda: not self._env._leases(), "no lease is left", 60)

    # -- faults ------------------------------------------------------------------------------------

    def _child(self, fault: Planned) -> int:
        """Return the child of a worker that started a body last."""
        workers = [worker for worker in self._env.workers if worker.pool == "prefork"]
        worker = workers[fault.who % len(workers)]
        end = self._clock() + PATIENCE
        while self._clock() < end:
            children = worker.all_pids() - {worker.process.pid}
            pids = [event["pid"] for event in self._env.ledger.events("start") if event["pid"] in children]
            if pids:
                return int(pids[-1])
            self._wait(0.2)
        raise AssertionError(f"no child of {worker.name} has begun a body")

    def _kill_child(self, fault: Planned) -> None:
        self._env.kill_child(self._child(fault))

    def _kill_worker(self, fault: Planned) -> None:
        worker = self._env.workers[fault.who]
        self._env.kill(worker)
        self._env.workers.remove(worker)
        self._env.worker(worker.pool, CONCURRENCY)

    def _stop_worker(self, fault: Planned) -> None:
        with self._env.stopped(self._env.workers[fault.who]):
            self._wait(fault.span)

    def _stop_child(self, fault: Planned) -> None:
        with self._env.child_stopped(self._child(fault)):
            self._wait(fault.span)

    def _pause_store(self, kind: str, fault: Planned) -> None:
        with self._env.schedule.during(kind):
            self._env.store.pause()
            self._wait(fault.span)
            self._env.store.resume()

    def _empty_store(self, fault: Planned) -> None:
        """Restart the store without its data. Nobody reaches it before the probe does, so that counters can be compared."""
        with self._env.schedule.during("empty"):
            self._env.proxy.hanging.set()
            self._env.store.stop()
            self._wait(fault.span)
            self._env.store.start()
            self._env.watch_commands()
            self._env.proxy.hanging.clear()

    def _half_open(self, fault: Planned) -> None:
        with self._env.schedule.during("pause"):  # too short to lose a lease, see fault 20
            self._env.proxy.hanging.set()
            self._wait(fault.span)
            self._env.proxy.hanging.clear()

    def _command(self, *words: str) -> None:
        with self._env.client() as client:
            client.execute_command(*words)


@contextlib.contextmanager
def broker() -> Iterator[str | RabbitMQServer]:
    """Yield RabbitMQ, because Kombu 5.7 on Redis loses a message of a worker that is killed right after it received it."""
    try:
        server = RabbitMQServer().start()
    except ServerMissing:
        print("without RabbitMQ: messages of killed workers may be lost")
        yield "redis"
        return
    with contextlib.closing(server):
        yield server


def main() -> int:
    """Run, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("celery_singleton_lock").addHandler(
        logging.NullHandler()
    )  # of the publisher, about planned faults
    with (
        broker() as which,
        WorkerEnvironment(ttl=TTL, broker=which, proxied=True, singleton_lock_queue_ttl=QUEUED) as env,
    ):
        soak = Soak(env, options.seed, options.minutes * 60)
        soak.run()
        soak.finish(180)
        wrong = disagreements(env.ledger.events(), env.schedule, locks.stats(env.app))
        violations = env.verdict()
        events = env.ledger.events()
        report(options, soak, figures(events), Counter(violation.kind for violation in violations))
        if violations:
            print(table(violations))
            print(history(events, env, {key for key in bench_keys(events) if any(key in v.text for v in violations)}))
        print("\n".join(["counters:", *(wrong or ["as seen"])]))
    return int(bool(violations or wrong))


def bench_keys(events: Sequence[Event]) -> set[str]:
    """Return the lock keys of all that ran."""
    return {event["key"] for event in events if event["what"] == "start"}


def history(events: Sequence[Event], env: WorkerEnvironment, keys: set[str]) -> str:
    """Return the events of these lock keys and all faults, ordered by time."""
    lines = [
        (e["at"], str(e)) for e in events if e.get("key") in keys and e["what"] != "duplicate" and not e.get("sent")
    ]
    for fault in env.schedule:
        who = sorted(fault.pids)
        lines += [(fault.at, f"FAULT {fault.kind} {who}"), (fault.until, f"fault over: {fault.kind} {who}")]
    lines += [(0.0, f"{w.name} {sorted(w.all_pids())}") for w in env.workers]
    return "\n".join(f"{at:9.3f} {text}" for at, text in sorted(lines))


def report(options: argparse.Namespace, soak: Soak, counts: dict[str, int], kinds: Counter[str]) -> None:
    """Print the table."""
    print(f"soak of {options.minutes:g} minutes, seed {options.seed}, lock_ttl {TTL:g} s")
    rows = [*Counter(fault.kind for fault in soak.done).items(), *counts.items()]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("overlap", "untold", "lost", "order")]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("never run", "leftover", "early", "theft")]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("late renewal", "runs", "reused", "blind")]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("cooldown", "starts", "quiet")]
    for name, count in rows:
        print(f"  {name:<28} {count:>6}")


if __name__ == "__main__":
    sys.exit(main())
