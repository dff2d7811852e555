"""Tables for people and JSON for programs.

Keys have to stay whole, so that they can be pasted: nothing is cut or wrapped. A line that is longer than a terminal goes on in
its next line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from io import StringIO
from typing import Any
from unicodedata import combining, east_asian_width

import click

from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.texts import printable

Rows = Sequence[Sequence[str]]
#: Above so many rows a table is not coloured: rich would need seconds for it.
MOST_COLOURED = 500
_STYLES = {
    **dict.fromkeys(("running", "success"), "green"),
    **dict.fromkeys(("queued", "retry", "cooldown", "paused", "released_by_operator"), "yellow"),
    **dict.fromkeys(("failure", "expired", "hung?"), "red"),
}
LOCK_HEAD = ("TASK", "STATE", "AGE", "TTL", "RENEWED", "DUPLICATES", "WAITING", "NODE", "TASK-ID", "KEY")


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value), color=True)  # nothing is to be removed, which needs time


def print_table(head: Sequence[str], rows: Rows) -> None:
    """Print a table."""
    click.echo(table_text(head, rows), color=True)


def lock_row(lock: Any) -> Sequence[str]:
    """Return the cells of a lock under `LOCK_HEAD`."""
    holder = lock.holder
    times = duration_text(holder.age), duration_text(holder.remaining)
    if holder.state == "paused":  # nothing is counted
        who = f"{holder.by}: {holder.reason}" if holder.reason else holder.by
        return lock.task, holder.state, *times, "", "", "", who, "", lock.key
    renewed = "" if holder.renewed is None else duration_text(holder.renewed)
    counts = renewed, f"{lock.duplicates}", f"{lock.waiting}"
    state = "hung?" if holder.hung else holder.state
    return lock.task, state, *times, *counts, holder.node, holder.task_id, lock.key


def table_text(head: Sequence[str], rows: Rows) -> str:
    """Return a table as text; in colours on a terminal, if rich is installed."""
    rows = [
        row if "".join(row).isprintable() and all(row) else [printable(cell) or "-" for cell in row] for row in rows
    ]
    if len(rows) <= MOST_COLOURED and sys.stdout.isatty() and not _is_plain() and find_spec("rich"):
        return _coloured(head, rows)
    widths = table_widths(head, rows)
    line = "  ".join(f"{{:<{width}}}" for width in widths[:-1]) + "  {}"
    return "\n".join(line.format(*row) if "".join(row).isascii() else _padded(row, widths) for row in (head, *rows))


def _is_plain() -> bool:
    """Tell whether `celery --no-color` was called."""
    context = click.get_current_context(silent=True)
    return bool(context and getattr(context.obj, "no_color", False))


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
    return "  ".join(cells).rstrip()


def table_widths(head: Sequence[str], rows: Rows) -> list[int]:
    """Return the width of each column on a terminal."""
    return [max(map(_width, column)) for column in zip(head, *rows, strict=True)]


def _width(text: str) -> int:
    """Return how many columns a text needs: East Asian characters need two, and marks that are combined with others none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _coloured(head: Sequence[str], rows: Rows) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell, ""), no_wrap=True, overflow="ignore") for cell in row))
    out = StringIO()
    width = sum(table_widths(head, rows)) + 2 * len(head)
    # Without a height, rich takes a dumb terminal to have 80 columns.
    console = Console(file=out, force_terminal=True, width=width, height=25)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
