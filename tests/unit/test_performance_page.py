"""The figures of a benchmark run go into docs/project/benchmarks.md without a change to its prose."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import page
from benchmarks.report import Section, Table, Target, json_of, text_of
from benchmarks.rounds import Spread

pytestmark = pytest.mark.harness

LETTERS = "abcdefghilm"


def sections(letters: str = LETTERS) -> dict[str, Section]:
    """Return sections that have been written to JSON and read again; all figures of the summary are in them."""
    made = []
    for letter in letters:
        lines = [line for line in page.SUMMARY if line.section == letter]
        tables = [
            Table(line.table, (line.column, "other"), [(line.row, (Spread(1234, 1, 2.5), "–"))]) for line in lines
        ]
        made.append(Section(f"({letter}) name", "How.", tables or [Table("T", ("c",), [])], [Target("t", 1.0, 2.0)]))
    found: Any = json.loads(json.dumps(json_of(made, {})))
    assert [text_of(section) for section in made] == [text_of(page.section_of(one)) for one in found["sections"]]
    return {one["name"][1]: page.section_of(one) for one in found["sections"]}


def text() -> str:
    return page.PAGE.read_text("utf-8")


def test_all_blocks_are_replaced() -> None:
    """Every table and figure of the page comes from the run; the prose stays."""
    before, after = text(), page.filled(text(), {"python": "9.9"}, sections())

    assert "python 9.9" in after
    assert len(page.SUMMARY) == after.count("| 1,234")
    assert len(LETTERS) == after.count("met     t: 1, bound 2")
    prose = [line for line in before.splitlines() if line.startswith(("#", "**", "*"))]
    assert prose == [line for line in after.splitlines() if line.startswith(("#", "**", "*"))]
    assert before.count("```") == after.count("```")


def test_part_of_a_run() -> None:
    """A run of one benchmark replaces its own section alone."""
    after = page.filled(text(), {}, sections("h"))

    assert 1 == after.count("met     t: 1, bound 2")
    assert text().partition("<!-- /summary -->")[0] == after.partition("<!-- /summary -->")[0]


def test_missing_figure() -> None:
    """A summary line without a figure is an error that names it, not an empty cell."""
    made = sections()
    made["i"] = sections("h")["h"]
    with pytest.raises(ValueError, match="import, added"):
        page.filled(text(), {}, made)


def test_missing_block() -> None:
    """A section without a block on the page is an error."""
    with pytest.raises(ValueError, match="0 blocks named h"):
        page.filled("", {}, sections("h"))
