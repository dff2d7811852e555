"""Tests of the soak, without servers: its seed alone decides the faults."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faults.soak import POOLS, SPANS, WORK, Soak

pytestmark = pytest.mark.harness

MINUTES = 10
#: Maximum seconds of a turn of work if sending a message takes half a second.
TURN = 0.5 * max(work.burst for work in WORK) + 0.4


class Machine:
    """A fake environment and clock that record each fault: kind, worker, start and end.

    Args:
        slow: seconds that it takes to send a message and to start a worker.
    """

    def __init__(self, slow: float) -> None:
        self.slow = slow
        self.time = 0.0
        self.sent = 0
        self.expected: set[str] = set()
        self.faults: list[tuple[str, int | None, float, float]] = []
        self.app = None
        self.workers: list[Any] = []
        self.started = 0
        self.schedule = self
        self.ledger = SimpleNamespace(events=self._starts)
        self.store = SimpleNamespace(pause=int, resume=int, stop=int, start=int)
        self.proxy = SimpleNamespace(hanging=threading.Event())
        self.watch_commands = int

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def start(self, pool: str, concurrency: int) -> None:
        pid = 100 * self.started
        self.started += 1
        pids = frozenset({pid, pid + 1, pid + 2} if pool == "prefork" else {pid})
        worker = SimpleNamespace(name=str(pid), pool=pool, process=SimpleNamespace(pid=pid), all_pids=lambda: pids)
        worker.ready = lambda app: None
        self.workers.append(worker)

    def worker(self, pool: str, concurrency: int) -> None:
        self.time += self.slow
        self.start(pool, concurrency)

    def send(self, *args: Any, **options: Any) -> None:
        self.time += self.slow
        self.sent += 1
        self.expected.add(f"{args[0]}: {options['expect']}")

    def _starts(self, what: str) -> list[dict[str, int]]:
        """Return start events; which child started a body last varies, as with real processes."""
        children = [pid + 1 + (self.sent + extra) % 2 for pid in range(0, 100 * self.started, 100) for extra in (0, 1)]
        return [{"pid": pid} for pid in children]

    def _place(self, pid: int) -> int:
        return next(place for place, worker in enumerate(self.workers) if pid in worker.all_pids())

    def kill(self, worker: Any) -> None:
        self.faults.append(("kill", self.workers.index(worker), self.time, self.time))

    def kill_child(self, pid: int) -> None:
        self.faults.append(("kill child", self._place(pid), self.time, self.time))

    @contextlib.contextmanager
    def during(self, kind: str, who: int | None = None) -> Iterator[None]:
        begin = self.time
        yield
        self.faults.append((kind, who, begin, self.time))

    def kill_connections(self) -> None:
        self.faults.append(("kill connections", None, self.time, self.time))

    def stopped(self, worker: Any) -> contextlib.AbstractContextManager[None]:
        return self.during("stop", self.workers.index(worker))

    def child_stopped(self, pid: int) -> contextlib.AbstractContextManager[None]:
        return self.during("child stop", self._place(pid))

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        yield SimpleNamespace(execute_command=self._command)

    def _command(self, *words: str) -> None:
        self.faults.append((" ".join(words), None, self.time, self.time))


def _run(seed: int, slow: float) -> Machine:
    machine = Machine(slow)
    Soak(cast(Any, machine), seed, MINUTES * 60, machine.clock, machine.sleep).run()
    return machine


@pytest.mark.parametrize("seed", range(1, 6))
def test_faults_depend_on_the_seed_alone(seed: int) -> None:
    """The speed of the machine does not change the faults, their order, their workers, their times or their lengths."""
    fast, slow = _run(seed, 0.0), _run(seed, 0.5)
    assert fast.sent > 2 * slow.sent, "they do not differ in speed"
    assert [(kind, who) for kind, who, _, _ in fast.faults] == [(kind, who) for kind, who, _, _ in slow.faults]
    before = (0.0, 0.0)
    for (kind, _, begin, end), (_, _, slow_begin, slow_end) in zip(fast.faults, slow.faults, strict=True):
        assert 0 <= (slow_end - slow_begin) - (end - begin) < TURN, kind
        # A starting worker, and a child without a body yet, take additional time.
        assert 0 <= (slow_begin - before[1]) - (begin - before[0]) < TURN + 0.5, kind
        before = (end, slow_end)


def test_faults_of_two_seeds_differ() -> None:
    """Another seed gives another run."""
    assert _run(1, 0.0).faults != _run(2, 0.0).faults


def test_a_run_has_all_kinds_and_everybody() -> None:
    """A run of ten minutes has each kind of fault, hits each worker, uses its time and hardly exceeds it."""
    machine = Machine(0.0)
    soak = Soak(cast(Any, machine), 1, MINUTES * 60, machine.clock, machine.sleep)
    soak.run()
    assert set(SPANS) == {fault.kind for fault in soak.done}
    assert set(range(len(POOLS))) == {who for _, who, _, _ in machine.faults if who is not None}
    assert MINUTES * 60 - 20 < machine.time <= MINUTES * 60 + 1e-6


def test_something_is_expected_of_every_message() -> None:
    """Each kind of work is sent, with its own expectation."""
    assert {f"{work.name}: {work.expect}" for work in WORK} == _run(1, 0.0).expected
