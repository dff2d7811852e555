"""(f) A hundred tasks at once, in a pool of threads and in one of greenlets."""

from __future__ import annotations

from benchmarks.report import Bars, Section, Table
from benchmarks.rounds import Spread, shuffled
from benchmarks.stage import Stage
from benchmarks.tasks import BARE
from benchmarks.worker import BODIES, Drained, Worker

POOLS = ("threads", "gevent")
CONCURRENCY = 100
SECONDS = 0.1  # of each body
HOW = (
    f"{CONCURRENCY} places in the pool, bodies that wait {SECONDS} s; time to publish and to drain a batch and the worker's "
    f"CPU, all for each task. With nothing but waiting, a task would take {SECONDS / CONCURRENCY * 1e6:,.0f} "
    "µs to drain. The peers' locks are taken by the publisher, this library's by the worker."
)


def run(stage: Stage) -> Section:
    """Measure all kinds in both pools."""
    found = {pool: measured(stage, pool) for pool in POOLS}
    tables = [_table(pool, batches) for pool, batches in found.items()]
    bars = [
        Bars(
            f"CPU of a task, {pool}, {CONCURRENCY} at once", "µs", {kind: _cpu(took) for kind, took in batches.items()}
        )
        for pool, batches in found.items()
    ]
    return Section("(f) pools", HOW, tables, (), bars)


def measured(stage: Stage, pool: str) -> dict[str, list[Drained]]:
    """Batches of each kind, in turns."""
    found: dict[str, list[Drained]] = {kind: [] for kind in stage.tasks}
    kinds, size = list(stage.tasks), stage.few(400, 50)
    with Worker(stage, pool, CONCURRENCY) as worker:
        for task in stage.tasks.values():
            worker.drain(task, CONCURRENCY)
        for order in shuffled(kinds, stage.few(8, 1)):
            for kind in order:
                found[kind].append(worker.drain(stage.tasks[kind], size, SECONDS))
    return found


def _table(pool: str, batches: dict[str, list[Drained]]) -> Table:
    rows = [
        (
            kind,
            (
                Spread.of([one.published for one in took], 1e6),
                Spread.of([one.drained for one in took], 1e6),
                _cpu(took),
                _added(took, batches[BARE]),
            ),
        )
        for kind, took in batches.items()
    ]
    return Table(f"One task, {pool}", ("publish, µs", "drain, µs", "CPU, µs", "CPU added, µs"), rows)


def _cpu(took: list[Drained]) -> Spread:
    return Spread.of([one.cpu[BODIES] for one in took], 1e6)


def _added(took: list[Drained], bare: list[Drained]) -> Spread:
    return Spread.of([one.cpu[BODIES] - other.cpu[BODIES] for one, other in zip(took, bare, strict=True)], 1e6)
