"""The command `check`: a plug-in for Nagios, Icinga and others that take its exit status and its one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from celery_singleton_lock import locks
from celery_singleton_lock.cli.duration import DURATION
from celery_singleton_lock.cli.group import as_json, in_one_line, option, singleton
from celery_singleton_lock.cli.output import print_json
from celery_singleton_lock.locks.health import NAMES, UNKNOWN, Health
from celery_singleton_lock.texts import printable


class _Check(click.Command):
    """A command whose errors are the status UNKNOWN: Nagios takes 2, as click exits with, for CRITICAL."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **options: Any) -> click.Context:
        as_json = "--json" in args  # click takes them out as it reads them
        try:
            return super().make_context(info_name, args, *more, **options)
        except click.UsageError as error:
            raise _told(Health(UNKNOWN, error.format_message()), as_json) from error

    def invoke(self, context: click.Context) -> Any:
        try:
            health = super().invoke(context)
        except Exception as failure:
            health = Health(UNKNOWN, in_one_line(context, failure).message)
        raise _told(health, context.params["as_json"])


def _told(health: Health, as_json: bool = False) -> click.exceptions.Exit:
    if as_json:
        print_json(health.as_dict())
    else:
        click.echo(line_of(health))
    return click.exceptions.Exit(health.status)


def line_of(health: Health) -> str:
    """Return the line that Nagios reads."""
    text = printable(health.text).replace("|", "/")  # what comes after a bar is read as numbers
    return f"SINGLETON {NAMES[health.status]} - {text}" + (f" | {health.perfdata}" if health.perfdata else "")


@singleton.command(cls=_Check)
@option("--max-age", type=DURATION, help="How long a body may hold a lock: 45s, 30m, 2h, 1d.")
@option("--max-blocked", type=click.IntRange(0), help="How many duplicates a holder may meet.")
@option("--max-lost", type=click.IntRange(0), help="How many locks may have been lost since the store has its data.")
@option(
    "--no-success-for", type=DURATION, help="How long a task that has started, or is named, may go without success."
)
@option(
    "--task", "named", multiple=True, metavar="NAME", help="Only this task or lock group; several times for several."
)
@as_json
@click.pass_obj
def check(obj: Any, /, named: Sequence[str], as_json: bool, **bounds: Any) -> Health:
    """Check the locks as a Nagios plug-in.

    Prints one line with performance data. Exits with 0 (OK), 1 (WARNING: a value is above its bound), 2 (CRITICAL: above twice
    its bound) or 3 (UNKNOWN: the store cannot be asked, or knows no task).
    """
    return locks.check(obj.app, named, **bounds)
