"""(j) How long a lock is idle between the end of its holder and the start of the next one that waits."""

from __future__ import annotations

from itertools import pairwise
from statistics import median, quantiles

from benchmarks.gates import OPEN
from benchmarks.overlap import Overlaps
from benchmarks.overlap_app import PLAIN, UNTIL_OPENED
from benchmarks.report import Section, Table, Target
from benchmarks.stage import Stage

SECONDS = 0.05  # of each body
BOUND = 3.0
HOW = (
    "Calls of one signature that wait, in prefork: the time from the end of a body to the start of the next one. "
    "A plain task in a worker with one place is compared, whose queue keeps the calls apart. The others have two places. "
    "`retry` comes back each 0.5 s, give or take a fifth."
)
#: How many calls of each kind: those that come back must not take minutes.
CALLS = {PLAIN: (200, 20), "wait": (200, 20), "retry": (20, 5)}


def run(stage: Stage) -> Section:
    """Measure each kind."""
    found = {}
    for kind, calls in CALLS.items():
        with Overlaps(stage, places=1 if kind == PLAIN else 2) as overlaps:
            overlaps.send(kind, 1, SECONDS)  # makes connections
            overlaps.settle(1)
            overlaps.send(kind, 1, UNTIL_OPENED)
            overlaps.send(kind, stage.few(*calls), SECONDS)
            if kind != PLAIN:
                overlaps.catch_up()  # else handling newcomers would delay the first pauses
            stage.broker_client.rpush(OPEN, 1)
            runs = overlaps.settle(1 + stage.few(*calls))
            found[kind] = [after[0] - before[1] for before, after in pairwise(runs)]
    rows = [(kind, (1e3 * median(idle), 1e3 * _p99(idle), len(idle))) for kind, idle in found.items()]
    ratio = median(found["wait"]) / median(found[PLAIN])
    target = Target("idle time, median, wait / plain queue with one place", ratio, BOUND)
    return Section("(j) idle time", HOW, [Table("Idle time", ("median, ms", "99 %, ms", "pauses"), rows)], [target])


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]
