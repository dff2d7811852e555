"""(h) Key derivation, against `json.dumps` of the arguments plus the digest, and the peers' keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from benchmarks.report import Bars, Section, Table, Target
from benchmarks.rounds import Rounds, mean_of
from benchmarks.stage import Stage
from benchmarks.tasks import ONCE, OURS, SCALARS, SINGLETON

FLOOR = "json.dumps and BLAKE2b"
HOW = (
    "The key of a call, by `task.lock_key_for(...)`; the reference is `json.dumps(args)` and its digest, which "
    "binds no parameters."
)


def run(stage: Stage) -> Section:
    """Measure keys of small and of large arguments."""
    small = measured(stage, SCALARS, stage.few(2000, 300), stage.few(15, 4))
    large = measured(stage, (1042, _records(200), 0.0), stage.few(20, 3), stage.few(15, 4))
    rows = [
        (name, (small.spread(name, 1e6), small.ratio(name, FLOOR), large.spread(name, 1e6), large.ratio(name, FLOOR)))
        for name in small.values
    ]
    columns = ("three scalars, µs", "× reference", "200 records, µs", "× reference")
    target = Target("key of three scalars / json.dumps and digest", small.ratio(OURS, FLOOR).median, 4.0)
    shown = {name: small.spread(name, 1e6) for name in small.values}
    return Section(
        "(h) key derivation",
        HOW,
        [Table("One key", columns, rows)],
        [target],
        [Bars("Key of three scalar arguments", "µs", shown)],
    )


def measured(stage: Stage, args: Sequence[Any], repeats: int, rounds: int) -> Rounds:
    """The seconds that one key of these arguments takes."""
    makers = _makers(stage, args)
    return Rounds({name: mean_of(maker, repeats) for name, maker in makers.items()}, rounds)


def _makers(stage: Stage, args: Sequence[Any]) -> dict[str, Callable[[], str]]:
    tasks = stage.tasks
    makers: dict[str, Callable[[], str]] = {
        FLOOR: lambda: blake2b(json.dumps(args).encode(), digest_size=16).hexdigest(),
        OURS: lambda: tasks[OURS].lock_key_for(*args),
    }
    if ONCE in tasks:
        makers[ONCE] = lambda: tasks[ONCE].get_key(args, {})
    if SINGLETON in tasks:
        makers[SINGLETON] = lambda: tasks[SINGLETON].generate_lock(tasks[SINGLETON].name, args, {})
    return makers


def _records(count: int) -> list[dict[str, Any]]:
    return [
        {"id": n, "name": f"record {n}", "price": n / 7, "tags": ["a", "b", None], "on": n % 2 == 0}
        for n in range(count)
    ]
