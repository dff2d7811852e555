"""Puts the figures of benchmark runs into docs/project/benchmarks.md: ``python -m benchmarks.page DIRECTORY...``.

A directory is what ``python -m benchmarks --out DIRECTORY`` has written; later ones replace sections of earlier ones. Only the
blocks between ``<!-- name -->`` and ``<!-- /name -->`` change: facts, summary, and the letter of each section.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Section, Table, Target, number_of, text_of
from benchmarks.rounds import Spread

PAGE = Path(__file__).resolve().parents[1] / "docs" / "project" / "benchmarks.md"
OURS = "this library"


@dataclass(frozen=True)
class Line:
    """A line of the summary: its text, its unit, and where its figure is."""

    text: str
    unit: str
    section: str
    table: str
    row: str
    column: str


_DUPLICATE = f"{OURS}, a duplicate"
SUMMARY = (
    Line("a task in prefork takes longer by", " µs", "b", "One task, prefork", OURS, "added, µs"),
    Line("a task in solo takes longer by", " µs", "b", "One task, solo", OURS, "added, µs"),
    Line("commands to the store for a run", "", "c", "One task", f"{OURS}, a run", "commands"),
    Line("commands to the store for a duplicate", "", "c", "One task", _DUPLICATE, "commands"),
    Line("a skipped duplicate: the library's part", " µs", "d", "One task", _DUPLICATE, "the call, µs"),
    Line("a skipped duplicate: with Celery's tracer", " µs", "d", "One task", _DUPLICATE, "tracer, µs"),
    Line("a run: with Celery's tracer", " µs", "d", "One task", f"{OURS}, a run", "tracer, µs"),
    Line(
        "renewal of 1,000 held locks", " % of one core", "e", "1,000 held locks", OURS, "% of one core at lock_ttl=30"
    ),
    Line("memory of a held lock in the process", " bytes", "g", "One held lock", OURS, "process, bytes"),
    Line(
        "memory of a held lock in the store, prefork",
        " bytes",
        "g",
        "One held lock",
        f"{OURS}, prefork",
        "store, bytes",
    ),
    Line("import, added to Celery and redis-py", " ms", "i", "Import", OURS, "added, ms"),
)


def filled(page: str, facts: Mapping[str, Any], sections: Mapping[str, Section]) -> str:
    """Return the page with its blocks replaced.

    Arguments:
        page: the text of the page.
        facts: what the figures depend on.
        sections: the sections by letter. The summary is replaced only if all of its sections are there.

    Raises:
        ValueError: the page has no block for a section, or a figure of the summary is missing.
    """
    blocks = {letter: f"```text\n{_tables(section)}\n```" for letter, section in sections.items()}
    blocks["facts"] = ", ".join(f"{name} {value}" for name, value in facts.items())
    if {line.section for line in SUMMARY} <= sections.keys():
        rows = [f"| {line.text} | {_figure(line, sections[line.section])}{line.unit} |" for line in SUMMARY]
        blocks["summary"] = "\n".join(["| what | figure |", "|---|---|", *rows])
    for name, text in blocks.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        page, count = pattern.subn(lambda match, text=text: match[1] + text + match[2], page)
        if count != 1:
            raise ValueError(f"the page has {count} blocks named {name}")
    return page


def section_of(found: Mapping[str, Any]) -> Section:
    """Return a section as `benchmarks.report.json_of` has written it."""
    tables = [
        Table(
            table["title"], table["columns"], [(name, [_cell(cell) for cell in cells]) for name, cells in table["rows"]]
        )
        for table in found["tables"]
    ]
    targets = [Target(target["text"], _cell(target["measured"]), target["bound"]) for target in found["targets"]]
    return Section(found["name"], found["how"], tables, targets)


def _cell(cell: Any) -> Any:
    return Spread(**cell) if isinstance(cell, dict) else cell


def _tables(section: Section) -> str:
    return textwrap.dedent(text_of(section).partition("\n\n")[2]).rstrip("\n")


def _figure(line: Line, section: Section) -> str:
    for table in section.tables:
        for name, cells in table.rows:
            if (table.title, name) == (line.table, line.row) and line.column in table.columns:
                cell = cells[list(table.columns).index(line.column)]
                return cell if isinstance(cell, str) else number_of(cell.median if isinstance(cell, Spread) else cell)
    raise ValueError(f"no figure for the summary: {line}")


def main() -> None:
    """Replace the blocks of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="Put figures into the page.")
    parser.add_argument("directories", nargs="+", type=Path, help="what `python -m benchmarks --out` has written")
    runs = [json.loads((name / "figures.json").read_text("utf-8")) for name in parser.parse_args().directories]
    sections = {found["name"][1]: section_of(found) for run in runs for found in run["sections"]}
    PAGE.write_text(filled(PAGE.read_text("utf-8"), runs[0]["facts"], sections), "utf-8")


if __name__ == "__main__":
    main()
