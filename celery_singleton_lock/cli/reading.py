"""Commands that only read: `list`, `show`, `stats` and `history`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from celery_singleton_lock import locks
from celery_singleton_lock.cli.duration import time_text
from celery_singleton_lock.cli.group import (
    as_json,
    chosen_locks,
    lock_filters,
    refuse_unknown,
    singleton,
    task_option,
    warn_if_unknown,
)
from celery_singleton_lock.cli.output import LOCK_HEAD, lock_row, print_json, print_table
from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.locks.naming import is_digest
from celery_singleton_lock.store.records import Run, Statistics, task_of
from celery_singleton_lock.texts import printable

_LABELS = {
    "acquired": "ACQUIRED",
    "duplicates": "DUPLICATES",
    "expired": "EXPIRED",
    "released_by_operator": "BY-OPERATOR",
    "lost": "LOST",
}
_RELEASED = ("success", "failure", "retry", "other")
STATS_HEAD = ("TASK", "NOW", *_LABELS.values(), *map(str.upper, _RELEASED), "MEAN", "LAST-START", "LAST-SUCCESS")
HISTORY_HEAD = ("STARTED", "DURATION", "OUTCOME", "NODE", "PID", "TASK-ID", "KEY", "ERROR")


@singleton.command("list")
@lock_filters
@as_json
@click.pass_obj
def list_(obj: Any, /, as_json: bool, **filters: Any) -> None:
    """List the locks that exist, the oldest first, and operators' pauses."""
    found = chosen_locks(obj.app, **filters)
    refuse_unknown(obj.app, filters["task"], found, filters["node"])
    if as_json:
        print_json([lock.as_dict() for lock in found])
    elif found:
        print_table(LOCK_HEAD, [lock_row(lock) for lock in found])
    else:
        click.echo(_no_locks(obj.app, filters))


def _no_locks(app: Any, filters: Mapping[str, Any]) -> str:
    """Say that there are no locks, or that all of them are younger than asked for."""
    younger = len(chosen_locks(app, **{**filters, "min_age": 0.0})) if filters["min_age"] else 0
    return f"no locks that old; {younger} younger" if younger else "no locks"


@singleton.command()
@click.argument("key", metavar="KEY|TASK_ID|TASK")
@as_json
@click.pass_obj
def show(obj: Any, /, key: str, as_json: bool) -> None:
    """Show who holds the lock with this KEY, or which lock the task with this id holds. Exits with 1 if there is none.

    KEY may also be the digest at its end. With the name of a TASK, show all its locks.
    """
    found = locks.show(obj.app, key)
    if as_json:
        print_json([lock.as_dict() for lock in found])
    for lock in () if as_json else found:
        name = "" if lock.key == key else f"{lock.key} is "
        counts = f"; duplicates met: {lock.duplicates}, waiting in line: {lock.waiting}"
        is_counted = lock.since and lock.holder.state != "paused"
        click.echo(f"{name}held by {lock.holder}{counts if is_counted else ''}")
    if not found and ":lock:" not in key:
        warn_if_unknown(obj.app, "")
    if not (found or as_json):
        click.echo(_nobody(key, locks.tasks(obj.app)) if ":lock:" not in key else "free")
    raise click.exceptions.Exit(0 if found else 1)


def _nobody(name: str, tasks: Sequence[str]) -> str:
    if name in tasks:
        return f"no lock of {printable(name)} is held"
    if is_digest(name):
        return f"no lock with the digest {name.removeprefix('lock:')} is held"
    return f"no lock is held by a task {printable(name)}; one that waits has none yet"


@singleton.command()
@task_option("All counters of")
@as_json
@click.pass_obj
def stats(obj: Any, /, task: str, as_json: bool) -> None:
    """Show what the locks of each task did since the store has its data, or all counters of one task.

    NOW: locks held now. ACQUIRED to OTHER: how many. SUCCESS to OTHER: locks released after such an end of the body. MEAN: how
    long a lock was held.
    """
    found = locks.stats(obj.app, task)
    refuse_unknown(obj.app, task, any(one.counters or one.states for one in found))
    if as_json:
        print_json([one.as_dict() for one in found])
    elif task:
        (one,) = found
        print_table(("COUNTER", "VALUE"), [(name, f"{value}") for name, value in _counters(one)])
    elif found:
        print_table(STATS_HEAD, [_stats_row(one) for one in found])


def _counters(one: Statistics) -> list[tuple[str, Any]]:
    now = [(f"now:{state}", count) for state, count in sorted(one.states.items())]
    times = [(name, time_text(one.counters.get(name, 0) / 1000)) for name in ("last_start", "last_success")]
    return [
        *now,
        *times,
        *sorted(item for item in one.counters.items() if item[0] not in ("last_start", "last_success")),
    ]


def _stats_row(one: Statistics) -> tuple[str, ...]:
    ended = one.sum("hold")
    counts = [*map(one.sum, _LABELS), *(one.counters.get(f"released:{end}", 0) for end in _RELEASED)]
    mean = duration_text(one.counters.get("hold_ms", 0) / 1000 / ended) if ended else "-"
    times = (time_text(one.counters.get(name, 0) / 1000) for name in ("last_start", "last_success"))
    return (one.task, f"{one.held}", *map(str, counts), mean, *times)


@singleton.command()
@click.argument("task", metavar="TASK|KEY")
@as_json
@click.pass_obj
def history(obj: Any, /, task: str, as_json: bool) -> None:
    """Show the last runs of a TASK or lock group, or those under one KEY; the one that ended last comes first."""
    runs, is_key = locks.history(obj.app, task), "}:lock:" in task
    if not (runs or is_key) and obj.app.conf.get("singleton_lock_history") != 0:
        refuse_unknown(obj.app, task, runs)
    if as_json:
        print_json([run.as_dict() for run in runs])
    elif runs:
        print_table(HISTORY_HEAD, [_run_row(run) for run in runs])
    elif obj.app.conf.get("singleton_lock_history") == 0:
        click.echo("no runs are kept, as singleton_lock_history is 0")
    else:
        click.echo(_no_runs(obj.app, task if is_key else ""))


def _no_runs(app: Any, key: str) -> str:
    """Say that there are no runs, and under a key, how far the history of its task reaches."""
    name = task_of(key.rpartition(":lock:")[0])
    kept = locks.history(app, name) if key else ()
    if not kept:
        return "no runs that have ended"
    return f"no runs under this key among the last {len(kept)} of {name}; the first of these ended at {time_text(kept[-1].ended)}"


def _run_row(run: Run) -> tuple[str, ...]:
    times = time_text(run.started), duration_text(run.duration)
    outcome = run.outcome if run.lease in ("released", run.outcome) else f"{run.outcome} (lease {run.lease})"
    return (*times, outcome, run.node, f"{run.pid}", run.task_id, run.key, run.error)
