"""(e) Renewal: one sweep over many leases of one process, against the same commands over a raw socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cycle import request_for
from benchmarks.report import Bars, Cell, Section, Table, Target
from benchmarks.rounds import Rounds, Spread, timed
from benchmarks.stage import Stage
from benchmarks.tasks import OURS
from celery_singleton_lock.clock import now
from celery_singleton_lock.context import context_of
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.native import CallbackRunner
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.reports.events import EventLogger

SIZES = (1, 100, 1000, 10_000)
RAW, LIBRARY = "raw socket, same EVALSHA", "this library"
FAR = 3600.0  # seconds of TTL with which no lease ends while sweeps are measured
HOW = (
    "All leases are made due, and `Renewer.renew_due()` is called; the raw socket replays the commands of one such "
    "sweep. CPU is that of the thread that sweeps. Held: so many leases are left to the renewal thread, and the "
    "CPU of the whole process is counted."
)


@dataclass(frozen=True)
class Swept:
    """What sweeps over so many leases took, and how many commands one of them sent."""

    wall: Rounds
    cpu: list[float]
    commands: int


def run(stage: Stage) -> Section:
    """Measure sweeps of all sizes, and what held leases cost while nothing else happens."""
    found = {size: swept(stage, size, stage.few(30 if size < 10_000 else 12, 4)) for size in SIZES}
    percent = held(stage, 1000, *((3.0, 3.5) if stage.quick else (30.0, 31.0)))
    sweeps = Table(
        "One sweep",
        ("commands", "wall, µs", "raw socket, µs", "× raw socket", "CPU, µs", "wall per lease, µs"),
        [(f"{size:,} leases", _cells(size, found[size])) for size in SIZES],
    )
    targets = [
        Target("sweep over 10,000 leases / raw socket", found[10_000].wall.ratio(LIBRARY, RAW).median, 1.6),
        Target("1,000 held locks at lock_ttl=30, % of one core", percent, 1.0),
    ]
    shown = {
        f"{name}, {size:,}": found[size].wall.spread(name, 1e6 / size) for size in SIZES for name in (RAW, LIBRARY)
    }
    share = Table("1,000 held locks", ("% of one core at lock_ttl=30",), [("this library", (percent,))])
    return Section("(e) renewal", HOW, [sweeps, share], targets, [Bars("Renewal, per lease", "µs", shown)])


def swept(stage: Stage, size: int, rounds: int) -> Swept:
    """Sweep over so many leases, and replay the same commands, in turns."""
    cpu: list[float] = []
    with leases(stage, size, FAR, by_thread=False) as (renewer, held_leases), stage.socket() as raw:
        sweep = _sweeping(renewer, held_leases, cpu)
        sweep()  # loads the script
        commands = stage.sent(sweep)
        wall = Rounds({RAW: timed(raw.all_of(commands)), LIBRARY: sweep}, rounds)
    return Swept(wall, cpu[2:], len(commands))


def _sweeping(renewer: Renewer[LeaseState], held_leases: list[LeaseState], cpu: list[float]) -> Callable[[], float]:
    def sweep() -> float:
        for lease in held_leases:
            lease.due = 0.0
        begin, used = time.perf_counter(), time.thread_time()
        renewer.renew_due()
        cpu.append(time.thread_time() - used)
        return time.perf_counter() - begin

    return sweep


@contextmanager
def leases(
    stage: Stage, size: int, ttl: float, by_thread: bool = True
) -> Iterator[tuple[Renewer[LeaseState], list[LeaseState]]]:
    """So many leases with different lock keys, granted by the store, in a renewer of their own, with its thread or without."""
    store, task = context_of(stage.app).store, stage.tasks[OURS]
    events = EventLogger(CallbackRunner())
    handler = BodyRenewal(store, store, events)
    renewer = Renewer(store, handler, events.loop_failed)
    if not by_thread:
        renewer.end()
    granted = [_granted(stage, store, task, handler, ttl) for _ in range(size)]
    for lease in granted:
        renewer.add(lease)
    try:
        yield renewer, granted
    finally:
        for lease in granted:
            renewer.remove(lease)
        stage.clear()


def _granted(stage: Stage, store: Any, task: Any, handler: BodyRenewal, ttl: float) -> LeaseState:
    spec = replace(request_for(task, next(stage.numbers), "account-17", 0.0), ttl=ttl)
    sent_at = now()
    result = store.acquire(spec)
    lease = LeaseState(spec, task)
    lease.granted(sent_at, result.fence, handler.verify)
    return lease


def held(stage: Stage, size: int, ttl: float, seconds: float) -> float:
    """Per cent of one core that this process uses while it holds so many leases, as it would be at a TTL of 30 s."""
    with leases(stage, size, ttl):
        begin, used = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - used) / (time.perf_counter() - begin)
    return 100 * share * ttl / 30


def _cells(size: int, found: Swept) -> tuple[Cell, ...]:
    wall = found.wall
    return (
        found.commands,
        wall.spread(LIBRARY, 1e6),
        wall.spread(RAW, 1e6),
        wall.ratio(LIBRARY, RAW),
        Spread.of(found.cpu, 1e6),
        wall.spread(LIBRARY, 1e6 / size),
    )
