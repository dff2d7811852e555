"""(l) How long the store's server works for a run or a duplicate: the time of its scripts, with different options and records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from statistics import median
from typing import Any

from benchmarks.report import Section, Table, Target
from benchmarks.rounds import Rounds, Spread, interval
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, declare, make_app, nothing
from benchmarks.tracer import around_body
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.testing import hold

PLAIN = "no options"
#: Options of each task. None of them finds another one that holds the signature, or waits for it.
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
#: What records may add to a run or a duplicate, in µs of the server's time.
BOUNDS = {RUN: 15.0, DUPLICATE: 3.0}
HOW = (
    "INFO commandstats before and after runs of different signatures, as in a prefork child: the time of all EVALSHA, divided by "
    "the number of runs. It does not include the network, nor the reading of the command. Duplicates meet a held lock. "
    "What records add is the difference within a round."
)


def run(stage: Stage) -> Section:
    """Measure a run of each task, and what records add to a run and a duplicate."""
    app = stage.tasks[BARE].app  # with settings of the peers that they have imported
    rounds = Rounds(
        {name: _sample(stage, _task(app, name, options), RUN) for name, options in OPTIONS.items()}, stage.few(40, 6)
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
        rounds = Rounds(samples, stage.few(40, 6))
    added = {what: _added(rounds, what) for what in BOUNDS}
    rows = [(name, (rounds.spread(name), added[what] if RECORDED in name else "–")) for what, name in _names(samples)]
    targets = [Target(f"records add to {what}, µs", added[what], bound) for what, bound in BOUNDS.items()]
    return Table("With records, and without", ("µs", "added, µs"), rows), targets


def _names(samples: Iterable[str]) -> list[tuple[str, str]]:
    return [(name.partition(", ")[0], name) for name in samples]


def _added(rounds: Rounds, what: str) -> Spread:
    """What records add: the median of the differences, with its 95 % interval."""
    differences = [one - other for one, other in rounds.pairs(f"{what}, {RECORDED}", f"{what}, {UNRECORDED}")]
    return interval(lambda chosen: median(differences[at] for at in chosen), len(differences))


def _task(app: Any, name: str, options: dict[str, Any] | None = None) -> Any:
    return declare(app, f"scripts-{name}", SingletonTask, nothing, **(options or {}))


def _sample(stage: Stage, task: Any, what: str) -> Callable[[], float]:
    def sample() -> float:
        stage.client.flushdb()
        runs = stage.few(300, 100)
        with hold(task, 0, "account-17") if what == DUPLICATE else nullcontext():
            return _time_of(stage, task, what, runs)

    return sample


def _time_of(stage: Stage, task: Any, what: str, runs: int) -> float:
    """Return the server's microseconds for each of so many deliveries, after one that makes scripts and keys."""
    for number in range(runs + 1):
        if number == 1:
            before = _script_time(stage.client)
        arguments = (0 if what == DUPLICATE else next(stage.numbers), "account-17")
        around_body(task, arguments, supervised=True)
    return (_script_time(stage.client) - before) / runs


def _script_time(client: Any) -> int:
    """Return the microseconds for which the server has run scripts."""
    return int(client.info("commandstats")["cmdstat_evalsha"]["usec"])
