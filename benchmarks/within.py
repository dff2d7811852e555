"""(b') Where the time of (b) goes in the process that runs the bodies, by timers within a real worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from benchmarks.path import POOLS
from benchmarks.report import Cell, Section, Table
from benchmarks.rounds import Spread, shuffled
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, LEAST, OURS, WIRE
from benchmarks.timers import PARTS, Taken
from benchmarks.worker import Worker

HOW = (
    "Batches as in (b), by workers that have timers around these calls: what the tracer needs for a task, and "
    "within it the two commands of the raw socket, and this library's execute (all around and including a body "
    "that does nothing), key, acquire and release; of each batch the median. CPU is that of the thread. A timer "
    "costs about 1 µs, which those around it have as well."
)


class Batches:
    """What the timers took, batch by batch: of each kind of task and each part, wall and CPU."""

    def __init__(self, stage: Stage, pool: str) -> None:
        tasks = {BARE: stage.tasks[BARE], WIRE: stage.wire, LEAST: stage.least, OURS: stage.tasks[OURS]}
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
            self.found[kind][part].append((median(wall for wall, _ in times), median(cpu for _, cpu in times)))

    def rows(self) -> list[tuple[str, tuple[Cell, ...]]]:
        """One for each part of each kind of task."""
        return [
            (f"{kind}: {part}", tuple(Spread.of(figures, 1e6) for figures in zip(*parts[part], strict=True)))
            for kind, parts in self.found.items()
            for part in PARTS
            if part in parts
        ]


def run(stage: Stage) -> Section:
    """Measure in both pools."""
    columns = ("wall, µs", "CPU, µs")
    return Section("(b') within", HOW, [Table(f"One task, {p}", columns, Batches(stage, p).rows()) for p in POOLS])
