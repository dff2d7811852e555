"""(k) What a storm of calls with one signature costs under each policy."""

from __future__ import annotations

from time import perf_counter

from benchmarks.gates import OPEN
from benchmarks.overlap import Overlaps
from benchmarks.overlap_app import UNTIL_OPENED, policies
from benchmarks.report import Cell, Section, Table
from benchmarks.stage import Stage
from benchmarks.tasks import ONCE, SINGLETON, base_classes

#: Calls that come back as often as time allows, or that do not run before others have ended.
UNSETTLED = ("retry",)
HOW = (
    "Calls of one signature in one burst, prefork with two places. The first body runs until each call was handled once; "
    "the others take no time. Handled: from the first publish until then. Settled: from the end of the first body "
    "until every call has ended. Messages and store calls: of the whole storm, for each call. Line: its memory in the store. "
    "The peers drop a duplicate when it is published, and know no other policy."
)


def run(stage: Stage) -> Section:
    """Send a storm under each policy."""
    size = stage.few(10_000, 300)
    kinds = [name for name in policies() if name not in UNSETTLED]
    kinds += [name for name in (ONCE, SINGLETON) if name in base_classes()]
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for kind in kinds:
        stage.clear()
        with Overlaps(stage, places=2) as overlaps:
            overlaps.warm_up()
            before, begin = overlaps.counts(), perf_counter()
            overlaps.send(kind, 1, UNTIL_OPENED)
            overlaps.send(kind, size - 1, 0.0)
            published = perf_counter() - begin
            overlaps.wait_for_calm()
            handled, memory = overlaps.last_event - begin, overlaps.memory()
            stage.broker_client.rpush(OPEN, 1)
            opened = perf_counter()
            overlaps.wait_for_calm(over=True)
            messages, calls = (after - one for after, one in zip(overlaps.counts(), before, strict=True))
            settled, runs = overlaps.last_event - opened, overlaps.runs()
            rows.append((kind, (published, handled, settled, runs, messages / size, calls / size, memory)))
    columns = ("publish, s", "handled, s", "settled, s", "runs", "messages", "store calls", "line, bytes")
    return Section("(k) storm", HOW, [Table(f"{size:,} calls", columns, rows)])
