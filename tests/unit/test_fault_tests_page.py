"""The table of fault tests and the fault matrix agree: each fault has a number, and each test of the matrix a fault."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "project" / "fault-tests.md").read_text(encoding="utf-8")
MODULES = sorted((ROOT / "tests" / "faults" / "matrix").glob("test_*.py"))
#: Tests of the harness itself.
OWN = {"test_what_is_missing_is_told"}


def faults() -> dict[int, list[str]]:
    """Return the words of the table's last column by the number of the fault."""
    head = TEXT.index("| no. | fault |")
    lines = TEXT[head : TEXT.index("\n\n", head)].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [1, *range(2, len(rows) + 1)] == [int(row[0]) for row in rows]
    return {int(row[0]): re.findall(r"`([\w.]+)`", row[-1]) for row in rows}


def matrix_tests() -> Iterator[str]:
    """Return the names of the matrix's test functions, as pytest spells them."""
    for module in MODULES:
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name not in OWN:
                yield f"{module.name}::{node.name}"


def fault_of(test: str) -> int:
    """Return the fault whose words match the name of a test best, or 0."""
    found = [(len(word), number) for number, words in faults().items() for word in words if word in test]
    exact = [number for number, words in faults().items() if test.partition("::")[2] in words]
    return exact[0] if exact else max(found, default=(0, 0))[1]


def test_each_fault_has_a_test() -> None:
    """The words of each fault select at least one test of the matrix."""
    names = list(matrix_tests())

    assert all(faults().values())
    assert [] == [word for words in faults().values() for word in words if not any(word in name for name in names)]


def test_each_test_has_a_fault() -> None:
    """The table names each test of the matrix, or the text below it."""
    limits = TEXT.partition("shows what does not hold")[0].rpartition("\n")[2]
    named = re.findall(r"`(test_\w+)`", limits)

    missing = [test for test in matrix_tests() if not fault_of(test) and not any(word in test for word in named)]
    assert [] == missing


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_figures_carry_the_number_of_their_fault(module: Path) -> None:
    """A figure in the report of a run starts with the number that its fault has in the table."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    own = {fault_of(test) for test in matrix_tests() if test.startswith(module.name)}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        number = fault_of(f"{module.name}::{function.name}")
        for node in ast.walk(function):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"\d+ \w", node.value):
                label = int(node.value.split()[0])
                assert label == number if function.name.startswith("test_") else label in own, node.value
