"""Commands that change locks: `release`, `pause` and `resume`."""

from __future__ import annotations

import time
from typing import Any

import click

from celery_singleton_lock import locks
from celery_singleton_lock.cli.duration import Duration, time_text
from celery_singleton_lock.cli.group import (
    as_json,
    flag,
    keeps_records,
    node_option,
    option,
    refuse_unknown,
    singleton,
    task_option,
)
from celery_singleton_lock.cli.output import print_json
from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.locks.releasing import ReleaseReport
from celery_singleton_lock.store.records import task_of


@singleton.command()
@click.argument("key", required=False, default="")
@node_option("All locks held on")
@task_option("All locks of")
@flag("--force", help="Release it although its worker runs the task, or does not answer.")
@flag("--dry-run", help="Ask, but release nothing.")
@as_json
@click.pass_obj
def release(obj: Any, /, key: str, node: str, task: str, force: bool, dry_run: bool, as_json: bool) -> None:
    """Release the lock with this KEY, or several, if their workers do not run their tasks any more.

    Exits with 1 if one of them is not released.
    """
    if bool(key) is bool(node or task):
        raise click.UsageError("name either the KEY of a lock, or --node or --task")
    if key:
        done = [locks.release(obj.app, key, force, dry_run)]
        if as_json:
            print_json(done[0].as_dict())
        else:
            _tell(done[0])
    else:
        done = _release_all(obj.app, task, node, force, dry_run, as_json)
        refuse_unknown(obj.app, task, done, node)
    raise click.exceptions.Exit(0 if all(one.released for one in done) else 1)


def _release_all(app: Any, task: str, node: str, force: bool, dry_run: bool, as_json: bool) -> list[ReleaseReport]:
    """Release several locks; print each result as it comes, or all of them as JSON. If it cannot go on, say how far it came."""
    done: list[ReleaseReport] = []

    def told(one: ReleaseReport) -> None:
        done.append(one)
        if not as_json:
            _tell(one, f"{one.key} ")

    try:
        locks.release_all(app, task, node, force, dry_run, told=told)
    except (StoreError, KeyboardInterrupt):
        if done:
            click.echo(f"released {sum(one.released for one in done)} locks, and could not go on", err=True)
        raise
    finally:
        if as_json and done:
            print_json([one.as_dict() for one in done])
    if not done:
        click.echo("[]" if as_json else "no locks")
    for lock in locks.find(app, task, node) if not as_json else ():
        if lock.holder.state == "paused":
            click.echo(f"but held by {lock.holder}, which `resume` ends: {lock.key}")
    return done


def _tell(one: ReleaseReport, prefix: str = "") -> None:
    click.echo(f"{prefix}{one}")
    for lock in one.others:
        ends = ", which `resume` ends" if lock.holder.state == "paused" else ""
        click.echo(f"but held by {lock.holder}{ends}: {lock.key}")


@singleton.command()
@click.argument("key", required=False, default="")
@task_option("All locks of")
@option("--for", "seconds", type=Duration(zero=False), required=True, help="How long: 45s, 30m, 2h, 1d.")
@option("--reason", default="", metavar="TEXT", help="Why; whoever meets the pause is shown it.")
@option("--by", default=locks.this_user, show_default="user@host", metavar="NAME", help="Who pauses it.")
@as_json
@click.pass_obj
def pause(obj: Any, /, key: str, task: str, seconds: float, reason: str, by: str, as_json: bool) -> None:
    """Let no body start under this KEY, or of a task, for so long. Bodies that run go on, and are counted.

    With lock_limit, the KEY of a slot stands for all slots of its lock.

    Other calls are duplicates meanwhile: their `on_duplicate` says what they do.
    """
    _refuse_both(key, task)
    paused = locks.pause(obj.app, seconds, key, task, reason, by)
    running: int | None = None
    if key or keeps_records(obj.app):
        found = locks.show(obj.app, paused) if key else locks.find(obj.app, task)
        running = sum(lock.holder.state == "running" for lock in found)
    count = "not known" if running is None else running
    until = time.time() + seconds
    if as_json:
        name = task or task_of(paused.rpartition(":lock:")[0])
        told = {"key": paused, "task": name, "seconds": seconds, "until": until, "running": running}
        return print_json({**told, "by": by, "reason": reason})
    click.echo(
        f"{task or paused} is paused for {duration_text(seconds)}, until {time_text(until)}; bodies that still run: {count}"
    )


@singleton.command()
@click.argument("key", required=False, default="")
@task_option("The pause of")
@as_json
@click.pass_obj
def resume(obj: Any, /, key: str, task: str, as_json: bool) -> None:
    """End a pause of this KEY, or of a task. Exits with 1 if there was none."""
    _refuse_both(key, task)
    ended = locks.resume(obj.app, key, task)
    if as_json:
        print_json({"key": key, "task": task or task_of(key.rpartition(":lock:")[0]), "ended": ended})
    else:
        click.echo(f"{task or key} is not paused any more" if ended else f"{task or key} was not paused")
        for lock in locks.show(obj.app, key) if key and not ended else ():
            if lock.holder.state == "paused":
                click.echo(f"but its whole task is: {lock.key}")
    raise click.exceptions.Exit(0 if ended else 1)


def _refuse_both(key: str, task: str) -> None:
    if bool(key) is bool(task):
        raise click.UsageError("name either the KEY of a lock, or --task")
