"""(b') Where the time of (b) goes in the process that runs the bodies, by timers within a real worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from benchmarks.cuts import CUTS
from benchmarks.path import POOLS
from benchmarks.report import Cell, Section, Table
from benchmarks.rounds import Spread, shuffled
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, LEAST, OURS, WIRE
from benchmarks.timers import PARTS, TRACER, Taken
from benchmarks.worker import Worker

HOW = (
    "Batches as in (b), by workers that have timers around these calls: what the tracer needs for a task, and "
    "within it the two commands of the raw socket, and this library's execute (all around and including a body "
    "that does nothing), key, acquire and release; of each batch the median. CPU is that of the thread. A timer "
    "costs about 1 µs, which those around it have as well. The last table has what the tracer takes less when a part of "
    "the library is taken out of the child, round by round; what is left still takes the lock and frees it."
)
COLUMNS = ("wall, µs", "CPU, µs")


class Batches:
    """What the timers took, batch by batch: of each kind of task and each part, wall and CPU."""

    def __init__(self, stage: Stage, pool: str) -> None:
        tasks = {kind: {**stage.tasks, **stage.floors}[kind] for kind in (BARE, WIRE, LEAST, OURS)}
        self.found: dict[str, dict[str, list[tuple[float, float]]]] = {kind: defaultdict(list) for kind in tasks}
        kinds, size = list(tasks), stage.few(50, 20)
        with Worker(stage, pool, timers=True) as worker:
            for task in tasks.values():
                worker.drain(task, 20)
                worker.timed()
            for order in shuffled(kinds, stage.few(40, 5)):
                for kind in order:
                    worker.drain(tasks[kind], size)
                    self._add(kind, worker.timed())

    def _add(self, kind: str, taken: Mapping[str, Taken]) -> None:
        for part, times in taken.items():
            self.found[kind][part].append(_medians(times))

    def rows(self) -> list[tuple[str, tuple[Cell, ...]]]:
        """One for each part of each kind of task."""
        return [
            (f"{kind}: {part}", tuple(Spread.of(figures, 1e6) for figures in zip(*parts[part], strict=True)))
            for kind, parts in self.found.items()
            for part in PARTS
            if part in parts
        ]


def _medians(times: Taken) -> tuple[float, float]:
    return median(wall for wall, _ in times), median(cpu for _, cpu in times)


def _without(stage: Stage) -> Table:
    """What a prefork child's tracer takes less of, each part of the library taken out in turn."""
    names, task = ["", *CUTS], stage.tasks[OURS]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with Worker(stage, "prefork", timers=True) as worker:
        worker.drain(task, 20)
        for order in shuffled(names, stage.few(100, 5)):
            for name in order:
                worker.without(name)
                worker.timed()
                worker.drain(task, stage.few(50, 20))
                found[name].append(_medians(worker.timed()[TRACER]))

    def less(name: str) -> tuple[Cell, ...]:
        pairs = list(zip(found[""], found[name], strict=True))
        return tuple(Spread.of([whole[column] - without[column] for whole, without in pairs], 1e6) for column in (0, 1))

    return Table("Tracer in prefork, less by", COLUMNS, [(name, less(name)) for name in CUTS])


def run(stage: Stage) -> Section:
    """Measure in both pools."""
    tables = [Table(f"One task, {pool}", COLUMNS, Batches(stage, pool).rows()) for pool in POOLS]
    return Section("(b') within", HOW, [*tables, _without(stage)])
