"""Shows the running demo: a live table on a terminal if Rich is installed, plain lines otherwise."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from example_project import report
from example_project.processes import WORKERS, node
from example_project.story import Story


class Display(Protocol):
    """Shows the demo's progress."""

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""

    def show(self, story: Story, seconds: float) -> None:
        """Show the progress of a demo of this many seconds."""

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table that stays on the screen."""

    def close(self) -> None:
        """Stop the live part of the screen."""


class Plain:
    """Prints one line every few seconds."""

    EVERY = 4.0

    def __init__(self) -> None:
        """Start with an empty screen."""
        self._next = 0.0

    def say(self, line: str) -> None:
        """Print the line."""
        print(line, flush=True)

    def show(self, story: Story, seconds: float) -> None:
        """Print a line if the last one is old enough."""
        if story.end >= self._next:
            self._next = story.end + self.EVERY
            now = ", ".join(f"{run.work} on {run.node.partition('@')[0]}" for run in story.unfinished())
            self.say(f"{story.end:5.1f} s  {len(story.runs)} runs, {len(story.events)} events; now: {now or '–'}")

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print columns of equal width."""
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        for row in (headings, *rows):
            self.say("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())

    def close(self) -> None:
        """Do nothing: there is no live part."""


class Live:
    """Shows a progress bar, the current bodies of each worker, and the figures so far."""

    def __init__(self) -> None:
        """Start the live part of the terminal."""
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(highlight=False)
        self._live = RichLive(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def say(self, line: str) -> None:
        """Print the line above the live part."""
        self._console.print(line, markup=False)

    def show(self, story: Story, seconds: float) -> None:
        """Draw the live part again."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        bar = ProgressBar(total=seconds, completed=min(story.end, seconds), width=60)
        heads = Text(f"{story.end:.0f} of {seconds:.0f} s" if story.end < seconds else "waiting for the last tasks")
        lines = [Text.assemble((f"{worker:>8}  ", "bold"), _state(story, node(worker))) for worker in WORKERS]
        figures = _rich_table(report.HEADINGS[:-1], [row[:-1] for row in report.table(story)])
        self._live.update(Group(heads, bar, *lines, figures), refresh=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a framed table."""
        self._console.print(_rich_table(headings, rows))

    def close(self) -> None:
        """Stop the live part."""
        self._live.stop()


def choose() -> Display:
    """Return the live display if the terminal can show it."""
    return Live() if sys.stdout.isatty() and find_spec("rich") else Plain()


def _state(story: Story, name: str) -> tuple[str, str]:
    kill = story.kill
    if kill and kill.node == name and not any(e.node == name and e.at > kill.at for e in story.events):
        return "killed", "bold red"
    works = [run.work for run in story.unfinished() if run.node == name]
    return (", ".join(works), "green") if works else ("idle", "dim")


def _rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(*headings, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table
