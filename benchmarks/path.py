"""(b) The whole path of a task that does nothing: publish and drain, by a real worker."""

from __future__ import annotations

from statistics import median

from benchmarks.cycle import RAW
from benchmarks.cycle import candidates as cycles
from benchmarks.report import Bars, Cell, Section, Table, Target
from benchmarks.rounds import Spread, median_of
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, LEAST, ONCE, OURS, SINGLETON, WIRE
from benchmarks.worker import Drained, Worker

POOLS = ("solo", "prefork")
HOW = (
    "A batch is published while the worker is kept busy, then drained: seconds of both for each task. One place "
    "in the pool, results ignored, log level WARNING, locks in a store of their own. Added: less the bare "
    "task's of the same round. The peers take their lock when they publish, this library when the task runs. "
    "The bare task whose body sends the same two commands over a raw socket is the floor: between two "
    "tasks processes sleep and caches cool, so that they cost more than in a loop. The least Python is "
    "another bare task, whose body makes these commands anew for each task, as a prefork child's with keys and a "
    "token of its own, sends them under a deadline and notes what it holds, and does nothing else. "
    "CPU is that of the process that runs the bodies."
)


class Batches:
    """Batches of each kind, round by round, and the raw-socket cycle beside them."""

    def __init__(self, stage: Stage, pool: str) -> None:
        self.found: dict[str, list[Drained]] = {kind: [] for kind in (*stage.tasks, WIRE, LEAST)}
        self.raw: list[float] = []
        tasks, size = {**stage.tasks, WIRE: stage.wire, LEAST: stage.least}, stage.few(50, 20)
        kinds = list(tasks)
        with Worker(stage, pool) as worker, stage.socket() as raw:
            cycle = median_of(cycles(stage, raw)[RAW], stage.few(500, 100))
            for task in tasks.values():
                worker.drain(task, 20)
            for number in range(stage.few(60, 9)):
                self.raw.append(cycle())
                for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                    self.found[kind].append(worker.drain(tasks[kind], size))

    def added(self, kind: str) -> list[float]:
        """Seconds that this kind adds to the bare task's whole path."""
        return [one.whole - bare.whole for one, bare in zip(self.found[kind], self.found[BARE], strict=True)]


def run(stage: Stage) -> Section:
    """Measure all kinds in both pools."""
    found = {pool: Batches(stage, pool) for pool in POOLS}
    tables = [_table(pool, batches) for pool, batches in found.items()]
    targets = [target for pool, batches in found.items() for target in _targets(pool, batches)]
    bars = [
        Bars(
            f"Added to the whole path, {pool}", "µs", {kind: _micro(b.added(kind)) for kind in b.found if kind != BARE}
        )
        for pool, b in found.items()
    ]
    return Section("(b) whole path", HOW, tables, targets, bars)


def _table(pool: str, batches: Batches) -> Table:
    columns = ("publish, µs", "drain, µs", "both, µs", "added, µs", "/ raw cycle", "/ floor", "CPU, µs")
    return Table(f"One task, {pool}", columns, [(kind, _cells(kind, batches)) for kind in batches.found])


def _cells(kind: str, batches: Batches) -> tuple[Cell, ...]:
    took = batches.found[kind]
    cells = (
        _micro([one.published for one in took]),
        _micro([one.drained for one in took]),
        _micro([one.whole for one in took]),
    )
    added: tuple[Cell, ...] = ("–", "–", "–")
    if kind != BARE:
        floor = median(batches.added(kind)) / median(batches.added(WIRE))
        added = (_micro(batches.added(kind)), _in_cycles(kind, batches), f"{floor:.2f}")
    return (*cells, *added, _micro([one.cpu for one in took]))


def _in_cycles(kind: str, batches: Batches) -> Spread:
    return Spread.of([added / raw for added, raw in zip(batches.added(kind), batches.raw, strict=True)])


def _targets(pool: str, batches: Batches) -> list[Target]:
    targets = [Target(f"{pool}: added / raw-socket cycle", _in_cycles(OURS, batches).median, 2.5)]
    peers = [median(batches.added(kind)) for kind in (ONCE, SINGLETON) if kind in batches.found]
    if peers:
        targets.append(
            Target(f"{pool}: added / what the best peer adds", median(batches.added(OURS)) / min(peers), 1 / 3)
        )
    return targets


def _micro(seconds: list[float]) -> Spread:
    return Spread.of(seconds, 1e6)
