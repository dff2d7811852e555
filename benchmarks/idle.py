"""(j) How long a lock is idle between the end of its holder and the start of the next one that waits."""

from __future__ import annotations

from itertools import pairwise
from statistics import median, quantiles

from benchmarks.overlap import Overlaps
from benchmarks.overlap_app import PLAIN, PLAIN_LATE, SUCCESSIVE, WAIT_LATE
from benchmarks.report import Section, Table, Target
from benchmarks.stage import Stage

SECONDS = 0.05  # of each body
BOUND = 3.0
HOW = (
    "Calls with one lock key that wait, in prefork: the time from the end of a body to the start of the next one. "
    "A plain task in a worker with one place is compared, whose queue keeps the calls apart. The others have two places. "
    "`plain, successive` has no lock and no line: each body publishes the next call as its last act, so it shows what publish, "
    "delivery and start alone cost. "
    "`retry` comes back each 0.5 s, give or take a fifth. With acks_late the worker has a prefetch multiplier of 1, as jobs "
    "that must not be lost need: then the next message of a plain task comes from the broker, too."
)
#: How many calls of each kind: those that come back must not take minutes.
CALLS = {PLAIN: (200, 20), "wait": (200, 20), "retry": (20, 5), PLAIN_LATE: (200, 20), WAIT_LATE: (200, 20)}
#: The plain task with which each kind is compared.
COMPARED = {"wait": PLAIN, WAIT_LATE: PLAIN_LATE}
#: Options of workers whose tasks acknowledge late.
ONE_AT_A_TIME = ("--prefetch-multiplier", "1")


def run(stage: Stage) -> Section:
    """Measure each kind."""
    found = {}
    for kind, calls in CALLS.items():
        options = ONE_AT_A_TIME if kind in (PLAIN_LATE, WAIT_LATE) else ()
        with Overlaps(stage, places=1 if kind in COMPARED.values() else 2, options=options) as overlaps:
            overlaps.send(kind, 1, SECONDS)  # makes connections
            overlaps.settle(1)
            overlaps.hold(kind)
            overlaps.send(kind, stage.few(*calls), SECONDS)
            if kind not in COMPARED.values():
                overlaps.catch_up()  # else handling newcomers would delay the first pauses
            overlaps.let_go()
            runs = overlaps.settle(1 + stage.few(*calls))
            found[kind] = _pauses(runs)
    found[SUCCESSIVE] = _successive(stage)
    rows = [(kind, (1e3 * median(idle), 1e3 * _p99(idle), len(idle))) for kind, idle in found.items()]
    targets = [
        Target(f"idle time, median, {kind} / {plain} with one place", median(found[kind]) / median(found[plain]), BOUND)
        for kind, plain in COMPARED.items()
    ]
    return Section("(j) idle time", HOW, [Table("Idle time", ("median, ms", "99 %, ms", "pauses"), rows)], targets)


def _successive(stage: Stage) -> list[float]:
    """Measure plain tasks that publish one another."""
    count = 1 + stage.few(200, 20)
    with Overlaps(stage, places=2) as overlaps:
        overlaps.send(PLAIN, 1, SECONDS)
        overlaps.settle(1)
        overlaps.succeed(count, SECONDS)
        return _pauses(overlaps.settle(count))


def _pauses(runs: list[tuple[float, float]]) -> list[float]:
    return [after[0] - before[1] for before, after in pairwise(runs)]


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]
