"""(l) How long the store's server works for a run: the time of its scripts, for tasks with different options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.report import Section, Table
from benchmarks.rounds import Rounds
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, declare, nothing
from benchmarks.tracer import around_body
from celery_singleton_lock import SingletonTask

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
HOW = (
    "INFO commandstats before and after runs of different signatures, as in a prefork child: the time of all EVALSHA, divided by "
    "the number of runs. It does not include the network, nor the reading of the command."
)


def run(stage: Stage) -> Section:
    """Measure a run of each task."""
    rounds = Rounds({name: _sample(stage, options) for name, options in OPTIONS.items()}, stage.few(40, 6))
    rows = [(name, (rounds.spread(name), rounds.ratio(name, PLAIN))) for name in OPTIONS]
    return Section("(l) server time", HOW, [Table("One run", ("µs", f"× {PLAIN}"), rows)])


def _sample(stage: Stage, options: dict[str, Any]) -> Callable[[], float]:
    name = "-".join(str(value) for value in options.values()) or "plain"
    app = stage.tasks[BARE].app  # with settings of the peers that they have imported
    task = declare(app, f"scripts-{name}", SingletonTask, nothing, **options)

    def sample() -> float:
        stage.client.flushdb()
        runs = stage.few(300, 100)
        around_body(task, (next(stage.numbers), "account-17"), supervised=True)  # makes scripts and keys
        before = _script_time(stage.client)
        for _ in range(runs):
            around_body(task, (next(stage.numbers), "account-17"), supervised=True)
        return (_script_time(stage.client) - before) / runs

    return sample


def _script_time(client: Any) -> int:
    """Return the microseconds for which the server has run scripts."""
    return int(client.info("commandstats")["cmdstat_evalsha"]["usec"])
