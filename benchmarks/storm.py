"""(k) What a storm of calls with one lock key costs under each policy."""

from __future__ import annotations

from time import perf_counter

from benchmarks.overlap import PLAIN_COMMANDS, SCRIPTS, Overlaps
from benchmarks.overlap_app import policies
from benchmarks.report import Cell, Section, Table
from benchmarks.stage import Stage
from benchmarks.tasks import ONCE, SINGLETON, base_classes

#: Policies under which a duplicate comes back again and again, until the holder has ended.
COMING_BACK = ("retry", "join")
HOW = (
    "Calls with one lock key in one burst, prefork with two places. The first body runs when the others are published, and "
    "until each call was handled once; the others take no time. Handled: from the burst's begin until then. Settled: from "
    "the end of the first body until every call has ended. `retry` comes back each 0.5 s, give or take a fifth. Messages "
    "and store calls: of the whole storm, for each call. Line: its memory in the store. The peers drop a duplicate when it "
    "is published, and know no other policy."
)


def run(stage: Stage) -> Section:
    """Send a storm under each policy."""
    size = stage.few(10_000, 60)
    peers = [name for name in (ONCE, SINGLETON) if name in base_classes()]
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for kind in ("wait", "join", *peers[:1]) if stage.quick else (*policies(), *peers):
        stage.clear()
        with Overlaps(stage, places=2, commands=PLAIN_COMMANDS if kind in peers else SCRIPTS) as overlaps:
            overlaps.catch_up()
            before = overlaps.counts()
            overlaps.hold(kind)
            begin = perf_counter()
            overlaps.send(kind, size - 1, 0.0)
            published = perf_counter() - begin
            overlaps.catch_up()
            handled, memory = perf_counter() - begin, overlaps.memory()
            overlaps.let_go()
            opened = perf_counter()
            overlaps.wait_for_calm(overlaps.locks, *([overlaps.received] if kind in COMING_BACK else []))
            messages, calls = (after - one for after, one in zip(overlaps.counts(), before, strict=True))
            settled, runs = overlaps.last_event - opened, overlaps.runs()
            rows.append((kind, (published, handled, settled, runs, (messages - 1) / size, calls / size, memory)))
    columns = ("publish, s", "handled, s", "settled, s", "runs", "messages", "store calls", "line, bytes")
    return Section("(k) storm", HOW, [Table(f"{size:,} calls", columns, rows)])
