"""(l) How long the store's server works for a run or a duplicate: the time of its scripts, with different options and records."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from statistics import median
from typing import Any

from benchmarks.report import Section, Table, Target
from benchmarks.rounds import Rounds, Spread, interval
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, declare, make_app, nothing
from benchmarks.tracer import around_body
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.redis.scripts import script
from celery_singleton_lock.testing import locked

PLAIN = "no options"
#: Options of each task. None of them finds another one that holds the lock, or waits for it.
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "join": {"on_duplicate": "join"},
    "lock_at_least": {"lock_at_least": 60},
    "max_starts": {"max_starts": 3},
    "lock_limit=3": {"lock_limit": 3},
    "wait": {"on_duplicate": "wait"},
    "run_once_more": {"on_duplicate": "run_once_more"},
    "replace": {"on_duplicate": "replace"},
    "replace, max_starts, lock_at_least": {"on_duplicate": "replace", "max_starts": 3, "lock_at_least": 60},
    "wait, max_starts, lock_limit=3": {"on_duplicate": "wait", "max_starts": 3, "lock_limit": 3},
}
RUN, DUPLICATE = "a run", "a duplicate"
#: A run with all records, and one without: the setting `singleton_lock_stats`.
RECORDED, UNRECORDED = "with records", "without records"
#: What records may add to a run or a duplicate, in µs of the server's time; and the time of two HINCRBY in a script on the server
#: that these bounds are for.
BOUNDS = {RUN: 15.0, DUPLICATE: 3.0}
TWO_COUNTS = 1.8
COUNTED = "without records, two HINCRBY"
COUNTING = "redis.call('HINCRBY', 'counters', 'a', 1) redis.call('HINCRBY', 'counters', 'b', 1)\n"
#: A run whose release does not look whether messages wait in line, and what that may add, in µs.
NO_LINE, NO_LINE_BOUND = "without records, without the line", 1.0
HOW = (
    "The calls of runs with different lock keys, as in a prefork child, are noted once. In each round they are sent again to an "
    "empty store, one after the other without a pause. INFO commandstats has the time of all EVALSHA, which is divided by the "
    "number of runs. It does not include the network, nor the reading of the command. Duplicates meet a held lock. "
    "`without the line`: the release does not look whether messages wait in line; a task that does not use it pays no more. "
    "What records add is the difference within a round. "
    f"The bounds are for a server that takes {TWO_COUNTS} µs for two more HINCRBY in a "
    "script. This one's time for them is measured in the same rounds, and the bounds are as much higher or lower."
)
_Words = tuple[str, ...]


def run(stage: Stage) -> Section:
    """Measure a run of each task, and what records add to a run and a duplicate."""
    app = stage.tasks[BARE].app  # with settings of the peers that they have imported
    rounds = Rounds(
        {name: _sample(stage, _task(app, name, options), RUN) for name, options in OPTIONS.items()}, stage.few(200, 6)
    )
    rows = [(name, (rounds.spread(name), rounds.ratio(name, PLAIN))) for name in OPTIONS]
    records, targets = _records(stage, app)
    return Section("(l) server time", HOW, [Table("One run", ("µs", f"× {PLAIN}"), rows), records], targets)


def _records(stage: Stage, app: Any) -> tuple[Table, list[Target]]:
    """Compare an app that records with one that does not."""
    other = make_app(stage.broker.url(), stage.store.url())
    other.conf.singleton_lock_stats = False
    tasks = {RECORDED: _task(app, "recorded"), UNRECORDED: _task(other, "recorded")}
    with closing(other):
        samples = {f"{what}, {how}": _sample(stage, tasks[how], what) for what in BOUNDS for how in tasks}
        samples[f"{RUN}, {COUNTED}"] = _sample(stage, tasks[UNRECORDED], RUN, _counting)
        samples[f"{RUN}, {NO_LINE}"] = _sample(stage, tasks[UNRECORDED], RUN, _no_line)
        rounds = Rounds(samples, stage.few(200, 6))
    added = {name: _added(rounds, name, _without(name)) for name in samples if name != _without(name)}
    rows = [(name, (rounds.spread(name), added.get(name, "–"))) for name in samples]
    slower = added[f"{RUN}, {COUNTED}"].median / TWO_COUNTS
    targets = [
        Target(f"records add to {what}, µs", added[f"{what}, {RECORDED}"], bound * slower)
        for what, bound in BOUNDS.items()
    ]
    line = _added(rounds, f"{RUN}, {UNRECORDED}", f"{RUN}, {NO_LINE}")
    targets.append(Target("the line adds to a run that does not use it, µs", line, NO_LINE_BOUND * slower))
    return Table("With records, and without", ("µs", "added, µs"), rows), targets


def _counting() -> tuple[str, str]:
    """Return the digest of the script that acquires, and that script with two counters more."""
    text, digest, _ = script("acquire", frozenset())
    return digest, text.replace("\n", f"\n{COUNTING}", 1)


def _no_line() -> tuple[str, str]:
    """Return the digest of the script that releases, and that script without what it does for the line."""
    text, digest, _ = script("release", frozenset())
    less = re.sub(
        r"if holder\[3\] then.*(?=redis.call\('DEL', lock)", "", text.replace("'line', ", ""), flags=re.DOTALL
    )
    return digest, less


def _without(name: str) -> str:
    return f"{name.partition(', ')[0]}, {UNRECORDED}"


def _added(rounds: Rounds, more: str, less: str) -> Spread:
    """What one takes more than the other: the median of the differences, with its 95 % interval."""
    differences = [one - other for one, other in rounds.pairs(more, less)]
    return interval(lambda chosen: median(differences[at] for at in chosen), len(differences))


def _task(app: Any, name: str, options: dict[str, Any] | None = None) -> Any:
    return declare(app, f"scripts-{name}", SingletonTask, nothing, **(options or {}))


def _sample(
    stage: Stage, task: Any, what: str, changed: Callable[[], tuple[str, str]] | None = None
) -> Callable[[], float]:
    """Return what measures a run or a duplicate; `changed`: returns the digest of a script, and what runs instead."""
    count = stage.few(300, 100)
    before, calls = _calls_of(stage, task, what, count)
    if changed:
        digest, text = changed()
        assert any(digest in words for words in calls)
        other = stage.client.script_load(text)
        calls = [tuple(other if word == digest else word for word in words) for words in calls]

    def sample() -> float:
        stage.client.flushdb()
        _send(stage, before)
        begin = _script_time(stage.client)
        _send(stage, calls)
        return (_script_time(stage.client) - begin) / count

    return sample


def _calls_of(stage: Stage, task: Any, what: str, count: int) -> tuple[list[_Words], list[_Words]]:
    """Return the script calls of so many deliveries, and those before: of the holder, and of a delivery that makes scripts."""
    found: list[_Words] = []
    pool, before = context_of(task.app).store._pool, 0
    execute = pool.execute

    def noted(command: Any, *more: Any) -> Any:
        found.append(command.texts)
        return execute(command, *more)

    stage.client.flushdb()
    pool.execute = noted
    with locked(task, 0, "account-17") if what == DUPLICATE else nullcontext():
        for _ in range(count + 1):
            around_body(task, (0 if what == DUPLICATE else next(stage.numbers), "account-17"), supervised=True)
            before = before or len(found)
        end = len(found)
    del pool.execute
    return found[:before], found[before:end]


def _send(stage: Stage, calls: Sequence[_Words]) -> None:
    """Have the server run these calls without a pause."""
    pipeline = stage.client.pipeline(transaction=False)
    for words in calls:
        pipeline.execute_command(*words)
    pipeline.execute()


def _script_time(client: Any) -> int:
    """Return the microseconds for which the server has run scripts."""
    return int(client.info("commandstats")["cmdstat_evalsha"]["usec"])
