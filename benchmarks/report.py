"""What a benchmark has found, and how it is printed and written down."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.rounds import Spread

Cell = Spread | float | int | str


@dataclass(frozen=True)
class Target:
    """A bound of the project's, and what was measured: met at or below the bound.

    Arguments:
        text: what is measured.
        measured: the figure, or its 95 % interval, which may leave it open.
        bound: of the figure.
    """

    text: str
    measured: float | Spread
    bound: float

    @property
    def verdict(self) -> str:
        low, high = (self.measured,) * 2
        if isinstance(self.measured, Spread):
            low, high = self.measured.low, self.measured.high
        return "met" if high <= self.bound else "MISSED" if low > self.bound else "open"


@dataclass(frozen=True)
class Table:
    """Rows of a name and cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Bars:
    """What the picture shows of a benchmark: one bar for each name."""

    title: str
    unit: str
    values: dict[str, Spread]


@dataclass(frozen=True)
class Section:
    """All that one benchmark has found.

    Arguments:
        name: its letter and its subject.
        how: what was measured, in a sentence or two.
        tables, targets, bars: the figures.
    """

    name: str
    how: str
    tables: Sequence[Table]
    targets: Sequence[Target] = ()
    bars: Sequence[Bars] = field(default=())


def text_of(section: Section) -> str:
    """A section to be printed."""
    parts = [f"{section.name}\n{textwrap.fill(section.how, 120)}", *(_table(table) for table in section.tables)]
    parts += ["\n".join(_target(target) for target in section.targets)] if section.targets else []
    return "\n\n".join(parts) + "\n"


def json_of(sections: Sequence[Section], facts: dict[str, Any]) -> dict[str, Any]:
    """All sections with the facts about the run, in JSON types."""
    found = [{**asdict(section), "targets": [_judged(target) for target in section.targets]} for section in sections]
    return {"facts": facts, "sections": found}


def _judged(target: Target) -> dict[str, Any]:
    return {**asdict(target), "verdict": target.verdict}


def _target(target: Target) -> str:
    return f"  {target.verdict.ljust(6)}  {target.text}: {_cell(target.measured)}, bound {number_of(target.bound)}"


def _table(table: Table) -> str:
    head = ("", *table.columns)
    lines = [head, *((name, *(_cell(cell) for cell in cells)) for name, cells in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = ["  " + "  ".join(_padded(word, widths[at], at) for at, word in enumerate(line)) for line in lines]
    return "\n".join(
        [f"  {table.title}", shown[0].rstrip(), "  " + "-" * (sum(widths) + 2 * len(widths) - 2), *shown[1:]]
    )


def _padded(word: str, width: int, column: int) -> str:
    return word.rjust(width) if column else word.ljust(width)


def _cell(cell: Cell) -> str:
    if isinstance(cell, Spread):
        return f"{number_of(cell.median)} ({number_of(cell.low)}–{number_of(cell.high)})"
    return cell if isinstance(cell, str) else number_of(cell)


def number_of(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
