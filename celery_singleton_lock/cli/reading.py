"""Commands that only read: `list`, `show`, `stats` and `history`."""

from __future__ import annotations

from typing import Any

import click

from celery_singleton_lock import locks
from celery_singleton_lock.cli.duration import time_text
from celery_singleton_lock.cli.group import as_json, chosen_locks, lock_filters, singleton, task_option, warn_if_unknown
from celery_singleton_lock.cli.output import LOCK_HEAD, lock_row, print_json, print_table, printable
from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.store.records import Run, Statistics

_LABELS = {
    "acquired": "ACQUIRED",
    "duplicates": "DUPLICATES",
    "expired": "EXPIRED",
    "revoked": "REVOKED",
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
    """List the locks that exist, the oldest first, and operators' holds."""
    found = chosen_locks(obj.app, **filters)
    warn_if_unknown(obj.app, filters["task"])
    if as_json:
        print_json([lock.as_dict() for lock in found])
    elif found:
        print_table(LOCK_HEAD, [lock_row(lock) for lock in found])
    else:
        click.echo("no locks")


@singleton.command()
@click.argument("key", metavar="KEY|TASK_ID")
@as_json
@click.pass_obj
def show(obj: Any, /, key: str, as_json: bool) -> None:
    """Show who holds the lock with this KEY, or which lock the task with this id holds. Exits with 1 if there is none."""
    found = locks.show(obj.app, key)
    if as_json:
        print_json([lock.as_dict() for lock in found])
    for lock in () if as_json else found:
        name = "" if lock.key == key else f"{lock.key} is "
        counts = f"; duplicates met: {lock.duplicates}, waiting in line: {lock.waiting}"
        is_counted = lock.since and not lock.holder.is_operators_hold
        click.echo(f"{name}held by {printable(f'{lock.holder}')}{counts if is_counted else ''}")
    if not found and ":lock:" not in key:
        warn_if_unknown(obj.app, "")
    if not (found or as_json):
        click.echo("free" if ":lock:" in key else f"no lock is held by a task {key}; one that waits has none yet")
    raise click.exceptions.Exit(0 if found else 1)


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
    warn_if_unknown(obj.app, task)
    if as_json:
        print_json([one.as_dict() for one in found])
    elif task:
        (one,) = found
        print_table(("COUNTER", "VALUE"), [(name, f"{value}") for name, value in _counters(one)])
    elif found:
        print_table(STATS_HEAD, [_stats_row(one) for one in found])


def _counters(one: Statistics) -> list[tuple[str, Any]]:
    now = [(f"now:{state}", count) for state, count in sorted({**one.states, "operators_holds": one.holds}.items())]
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
    runs = locks.history(obj.app, task)
    if as_json:
        print_json([run.as_dict() for run in runs])
    elif runs:
        print_table(HISTORY_HEAD, [_run_row(run) for run in runs])
    elif obj.app.conf.get("singleton_lock_history") == 0:
        click.echo("no runs are kept, as singleton_lock_history is 0")
    else:
        warn_if_unknown(obj.app, "" if ":lock:" in task else task)
        click.echo("no runs")


def _run_row(run: Run) -> tuple[str, ...]:
    times = time_text(run.started), duration_text(run.duration)
    return (*times, run.outcome, run.node, f"{run.pid}", run.task_id, run.key, run.error)
