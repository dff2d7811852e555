"""The command `watch`: `list`, again and again."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import click

from celery_singleton_lock.cli.duration import Duration, time_text
from celery_singleton_lock.cli.group import as_json, chosen_locks, lock_filters, option, singleton, warn_if_unknown
from celery_singleton_lock.cli.output import LOCK_HEAD, lock_row, print_json, table_text, table_widths
from celery_singleton_lock.errors import StoreError

_HOME, _CLEAR, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"


@singleton.command()
@lock_filters
@option(
    "--every", type=Duration(zero=False), default="2s", show_default=True, help="How long to wait between two looks."
)
@as_json
@click.pass_obj
def watch(obj: Any, /, every: float, as_json: bool, **filters: Any) -> None:
    """Show the locks that exist, again and again, until Ctrl-C. On a terminal, as many as fit."""
    live = not as_json and sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    with suppress(KeyboardInterrupt):
        is_checked = False
        if live:
            click.echo(_CLEAR, nl=False)
        while True:
            try:
                found = chosen_locks(obj.app, **filters)
                if not is_checked:
                    warn_if_unknown(obj.app, filters["task"])
                is_checked = True
                _print(found, as_json, live)
            except StoreError as error:  # it may come back
                click.echo(f"{time_text(time.time())}  the store of locks: {error}", err=True)
            time.sleep(every)
    if live:
        click.echo()  # after the terminal's ^C


def _print(found: list[Any], as_json: bool, live: bool) -> None:
    if as_json:
        return print_json([lock.as_dict() for lock in found])
    states = Counter(lock.holder.state for lock in found)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    head = f"{time_text(time.time())}  locks: {counts or 'none'}"
    shown = found[: _room(found)] if live else found
    lines = [head, *table_text(LOCK_HEAD, [lock_row(lock) for lock in shown]).splitlines()]
    if len(shown) < len(found):
        lines.append(f"and {len(found) - len(shown)} more")
    if live:
        click.echo(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW, nl=False)
    else:
        click.echo("\n".join(lines) + "\n")


def _room(found: list[Any]) -> int:
    """Return how many locks fit on the terminal, below the time and the head, if long lines go on in the next one."""
    columns, height = shutil.get_terminal_size()
    some = [lock_row(lock) for lock in found[:height]]
    width = sum(table_widths(LOCK_HEAD, some)) + 2 * len(LOCK_HEAD)
    lines = -(-width // columns)
    return max(1, (height - 3 - lines) // lines)
