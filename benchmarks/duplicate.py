"""(d) What a duplicate costs, against a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.deliveries import IGNORED, Deliveries, Took
from benchmarks.report import Bars, Section, Table, Target
from benchmarks.rounds import Spread, shuffled
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, OURS

RUN, DUPLICATE = "a run", "a duplicate"
HOW = (
    "Published to a Redis broker, and run by Celery's tracer, one at a time in one process; the call is what the "
    "tracer calls, made once more outside of it. A duplicate meets a held lock: with this library "
    "at its run (policy skip), with the peers when it is published, so that they have no message to send and "
    "none to run. What ends by Ignore costs Celery's tracer two tracebacks."
)

#: By kind, and whether it was a run or a duplicate: one of each round.
Found = dict[tuple[str, str], list[Took]]


def run(stage: Stage) -> Section:
    """Measure runs and duplicates of each kind."""
    found = measured(stage, stage.few(20, 4), stage.few(40, 10))
    rows = [(f"{kind}, {what}", _cells(took)) for (kind, what), took in found.items()]
    runs, duplicates = found[OURS, RUN], found[OURS, DUPLICATE]
    pairs = list(zip(runs, duplicates, strict=True))
    targets = [
        Target("a duplicate / a run, in the task's call", median(b.called / a.called for a, b in pairs), 1.0),
        Target("a duplicate / a run, publish and tracer", median(b.whole / a.whole for a, b in pairs), 1.0),
    ]
    shown = {f"{kind}, {what}": _spread([one.whole for one in took]) for (kind, what), took in found.items()}
    table = Table("One task", ("publish, µs", "the call, µs", "tracer, µs", "publish and tracer, µs"), rows)
    return Section(
        "(d) duplicate", HOW, [table], targets, [Bars("A run and a duplicate, publish and tracer", "µs", shown)]
    )


def measured(stage: Stage, rounds: int, repeats: int) -> Found:
    """Medians of each kind and round."""
    deliveries = Deliveries(stage)
    kinds, lockless = [*stage.tasks, IGNORED], (BARE, IGNORED)
    whats = [(kind, what) for kind in kinds for what in (RUN, DUPLICATE) if what == RUN or kind not in lockless]
    found: Found = {which: [] for which in whats}
    for order in shuffled(kinds, rounds):
        for kind in order:
            found[kind, RUN].append(_median([deliveries.run(kind) for _ in range(repeats)]))
            if kind not in lockless:
                with deliveries.held(kind) as args:
                    refused = [deliveries.duplicate(kind, args) for _ in range(repeats)]
                found[kind, DUPLICATE].append(_median(refused))
        stage.clear()
    return found


def _median(took: list[Took]) -> Took:
    return Took(*map(median, zip(*took, strict=True)))


def _cells(took: list[Took]) -> tuple[Spread, ...]:
    return tuple(_spread(seconds) for seconds in zip(*took, strict=True))


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread.of(seconds, 1e6)
