"""Faults at random under load: ``python -m tests.faults.soak --minutes 20 --seed 1`` prints a report, and fails on a violation.

The seed decides which faults come, when, and to whom; how far processes have come by then it cannot decide.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.faults.checker import check, figures, table
from tests.faults.harness import Bench, Worker
from tests.faults.ledger import Event
from tests.servers import RabbitMQServer, ServerMissing, until

TTL = 4.0
POOLS = ("prefork", "threads", "gevent", "prefork")
TAGS = 6
#: What docs/GUARANTEES.md names among what does not hold.
KNOWN = {"untold, data lost"}


class Soak:
    """One run under load.

    Args:
        bench: where it runs.
        seed: of all choices.
        seconds: how long new work and new faults come.
    """

    def __init__(self, bench: Bench, seed: int, seconds: float) -> None:
        self._bench = bench
        self._random = random.Random(seed)
        self._seconds = seconds
        self.done: Counter[str] = Counter()
        self._faults = {
            "child killed": self._kill_child,
            "worker killed": self._kill_worker,
            "worker stopped": self._stop_worker,
            "child stopped": self._stop_child,
            "store paused, short": lambda: self._pause_store("pause", TTL / 2),
            "store paused, long": lambda: self._pause_store("outage", TTL * 2),
            "store lost its data": self._empty_store,
            "scripts flushed": lambda: self._command("SCRIPT", "FLUSH"),
            "connections killed": lambda: self._command("CLIENT", "KILL", "TYPE", "normal"),
            "half-open": self._half_open,
        }

    def run(self) -> None:
        """Send work, and do a fault every few seconds; then wait until all work is done."""
        for pool in POOLS:
            self._bench.start(pool)
        for worker in self._bench.workers:
            worker.ready(self._bench.app)
        end = time.monotonic() + self._seconds
        next_fault = time.monotonic() + 3
        while time.monotonic() < end:
            self._work()
            time.sleep(self._random.uniform(0.05, 0.4))
            if time.monotonic() > next_fault:
                name = self._random.choice(list(self._faults))
                self._faults[name]()
                self.done[name] += 1
                next_fault = time.monotonic() + self._random.uniform(2, 6)

    def _work(self) -> None:
        tag = f"tag{self._random.randrange(TAGS)}"
        act = (
            ["sleep", round(self._random.uniform(0.05, 1.5), 2)] if self._random.random() < 0.9 else ["sleep", 2 * TTL]
        )
        if self._random.random() < 0.5:
            self._bench.send("late", tag, act, expect="run")
        else:
            self._bench.send("skip", tag, act)

    def settle(self, timeout: float) -> None:
        """Wait until all that must run has run, and no lease is left."""
        wanted = {event["task_id"] for event in self._bench.ledger.events("sent") if event["expect"] == "run"}

        def missing() -> set[str]:
            return wanted - {event["task_id"] for event in self._bench.ledger.events("end") if event["how"] == "return"}

        deadline = time.monotonic() + timeout
        while missing() and time.monotonic() < deadline:
            time.sleep(0.5)
        until(lambda: not self._bench._leases(), "no lease is left", 60)

    # -- faults ------------------------------------------------------------------------------------

    def _worker(self) -> Worker:
        return self._random.choice(self._bench.workers)

    def _child(self) -> int | None:
        workers = [worker for worker in self._bench.workers if worker.pool == "prefork"]
        pids = set().union(*(worker.all_pids() for worker in workers)) - {worker.process.pid for worker in workers}
        starts = [event["pid"] for event in self._bench.ledger.events("start")[-20:] if event["pid"] in pids]
        return starts[-1] if starts else None

    def _kill_child(self) -> None:
        pid = self._child()
        if pid is not None:
            self._bench.kill_child(pid)

    def _kill_worker(self) -> None:
        worker = self._worker()
        self._bench.kill(worker)
        self._bench.workers.remove(worker)
        self._bench.worker(worker.pool)

    def _stop_worker(self) -> None:
        with self._bench.stopped(self._worker()):
            self._wait(self._random.uniform(0.5, 2.5) * TTL)

    def _stop_child(self) -> None:
        pid = self._child()
        if pid is not None:
            with self._bench.schedule.during("child stop", frozenset({pid})):
                os.kill(pid, signal.SIGSTOP)
                self._wait(2 * TTL)
                os.kill(pid, signal.SIGCONT)

    def _pause_store(self, kind: str, seconds: float) -> None:
        with self._bench.schedule.during(kind):
            self._bench.store.pause()
            self._wait(seconds)
            self._bench.store.resume()

    def _empty_store(self) -> None:
        with self._bench.schedule.during("empty"):
            self._bench.store.stop()
            self._wait(self._random.uniform(0, 1))
            self._bench.store.start()

    def _half_open(self) -> None:
        with self._bench.schedule.during("outage"):
            self._bench.proxy.hanging.set()
            self._wait(TTL / 2)
            self._bench.proxy.hanging.clear()

    def _command(self, *words: str) -> None:
        with self._bench.client() as client:
            client.execute_command(*words)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._work()
            time.sleep(0.2)


@contextlib.contextmanager
def broker() -> Iterator[str | RabbitMQServer]:
    """RabbitMQ: on a Redis broker a worker that is killed just after it took a message from its list loses it (kombu 5.7)."""
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
    with broker() as which, Bench(ttl=TTL, broker=which, proxied=True) as bench:
        soak = Soak(bench, options.seed, options.minutes * 60)
        soak.run()
        soak.settle(180)
        for watcher in bench._watchers:
            watcher.close()
        events = bench.ledger.events()
        violations = check(events, bench.schedule, bench.limits)
        report(options, soak, figures(events), Counter(violation.kind for violation in violations))
        if violations:
            print(table(violations))
            print(history(events, bench, {key for key in bench_keys(events) if any(key in v.text for v in violations)}))
    return int(any(violation.kind not in KNOWN for violation in violations))


def bench_keys(events: Sequence[Event]) -> set[str]:
    """Return the keys of all signatures that ran."""
    return {event["key"] for event in events if event["what"] == "start"}


def history(events: Sequence[Event], bench: Bench, keys: set[str]) -> str:
    """Return what happened to these signatures, and all faults, in the order of time."""
    lines = [
        (e["at"], str(e)) for e in events if e.get("key") in keys and e["what"] != "duplicate" and not e.get("sent")
    ]
    for fault in bench.schedule:
        who = sorted(fault.pids)
        lines += [(fault.at, f"FAULT {fault.kind} {who}"), (fault.until, f"fault over: {fault.kind} {who}")]
    lines += [(0.0, f"{w.name} {sorted(w.all_pids())}") for w in bench.workers]
    return "\n".join(f"{at:9.3f} {text}" for at, text in sorted(lines))


def report(options: argparse.Namespace, soak: Soak, counts: dict[str, int], kinds: Counter[str]) -> None:
    """Print the table."""
    print(f"soak of {options.minutes:g} minutes, seed {options.seed}, lock_ttl {TTL:g} s")
    rows = [*soak.done.items(), *counts.items()]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("overlap", "untold", "untold, data lost", "lost")]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("never run", "leftover", "early", "theft")]
    rows += [(f"violations: {kind}", kinds[kind]) for kind in ("late renewal", "runs")]
    for name, count in rows:
        print(f"  {name:<28} {count:>6}")


if __name__ == "__main__":
    sys.exit(main())
