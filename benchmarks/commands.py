"""(c) What a task sends to the store of its locks, and what the store does for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks.deliveries import Deliveries
from benchmarks.report import Section, Table, Target
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, ONCE, OURS, SINGLETON

HOW = (
    "Counted with MONITOR on the store, without what scripts do inside, and with INFO commandstats, which "
    "counts that too. Published and run by Celery's tracer; the broker is another server. A duplicate meets a "
    "lock that is held: at its run, or with the peers when it is published."
)


def run(stage: Stage) -> Section:
    """Count the commands."""
    deliveries = Deliveries(stage)
    counted = {kind: count(stage, deliveries, kind) for kind in stage.tasks if kind != BARE}
    rows = [
        (f"{kind}, {what}", (len(sent), _words(command[0] for command in sent), inside))
        for kind, found in counted.items()
        for what, (sent, inside) in found.items()
    ]
    (a_run, _), (a_duplicate, _) = counted[OURS].values()
    targets = [
        Target("commands of a run", len(a_run), 2),
        Target("commands of a duplicate", len(a_duplicate), 1),
    ]
    columns = ("commands", "which", "with those inside scripts")
    return Section("(c) commands", HOW, [Table("One task", columns, rows)], targets)


def count(stage: Stage, deliveries: Deliveries, kind: str) -> dict[str, tuple[list[list[str]], int]]:
    """What a run and a duplicate of this kind send, and how many commands the store counts for each."""
    deliveries.run(kind)  # connections, scripts
    with deliveries.held(kind) as args:
        refuse = partial(deliveries.publish if kind in (ONCE, SINGLETON) else deliveries.deliver, kind, args)
        refuse()
        refused = _counted(stage, refuse)
    return {"a run": _counted(stage, partial(deliveries.deliver, kind)), "a duplicate": refused}


def _counted(stage: Stage, call: Callable[[], object]) -> tuple[list[list[str]], int]:
    sent = stage.sent(call)
    before = _calls(stage.client)
    call()
    return sent, _calls(stage.client) - before


def _calls(client: Any) -> int:
    """How many commands the server has carried out, those that count them left out."""
    stats = client.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name.lower() not in ("cmdstat_info", "cmdstat_ping"))


def _words(names: Iterable[str]) -> str:
    found = [name.upper() for name in names]
    return ", ".join(f"{found.count(name)} {name}" for name in dict.fromkeys(found)) or "–"
