"""The page about other systems: each name of ours in it exists."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import celery_singleton_lock
from celery_singleton_lock import Lease, MaxStarts, SingletonTask, locks, signals
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.config.call_options import CALL_OPTIONS
from celery_singleton_lock.config.options import SETTING_NAMES, TASK_OPTIONS
from celery_singleton_lock.policies import KINDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "other-systems.md"
CLASSES = {kind.__name__: kind for kind in (*KINDS, MaxStarts)}
FIELDS = {name: [field.name for field in fields(cls)] for name, cls in CLASSES.items()}
#: The rows of both tables, as cells.
ROWS = [
    [cell.strip() for cell in row.strip("|").split(" | ")]
    for row in re.findall(r"^\| .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
]
HERE = ROWS[ROWS.index(["here", "what others call it"]) + 1 : ROWS.index(["missing", "why, and what to do instead"])]
#: What the commands for operators begin with.
COMMAND = "celery singleton "
#: Names and expressions in the column of ours.
SPANS = sorted({span for row in HERE for span in re.findall(r"`([^`]+)`", row[0])})


def check_option(name: str, value: ast.expr) -> None:
    if name == "lock_options":
        assert isinstance(value, ast.Dict)
        assert all(isinstance(key, ast.Constant) and key.value in CALL_OPTIONS for key in value.keys)
    else:
        assert TASK_OPTIONS[name].is_valid(ast.literal_eval(value))


def check_call(call: ast.Call) -> None:
    if isinstance(call.func, ast.Name) and call.func.id in FIELDS:
        named = {str(keyword.arg) for keyword in call.keywords}
        assert named <= {*FIELDS[call.func.id]}
        assert len(call.args) <= len(FIELDS[call.func.id])
    else:
        check_name(ast.unparse(call.func))


def check_name(name: str) -> None:
    first, *rest = name.split(".")
    if name.startswith("self.lease."):
        assert hasattr(Lease, rest[1])
    elif first == "signals":
        assert all(hasattr(signals, attribute) for attribute in rest)
    elif first == "locks":
        assert all(hasattr(locks, attribute) for attribute in rest)
    elif name != "_.duplicate":  # of what a publish returns
        known = {*TASK_OPTIONS, *SETTING_NAMES, "lock_options", *celery_singleton_lock.__all__}
        assert name in known or callable(getattr(SingletonTask, name, None))


@pytest.mark.parametrize("span", SPANS)
def test_our_names(span: str) -> None:
    """A name of ours exists, with the values and fields that the page gives it."""
    if span.startswith(COMMAND):
        command, *options = span.removeprefix(COMMAND).split()
        assert set(options) <= {word for one in singleton.commands[command].params for word in one.opts}
        return
    (statement,) = ast.parse(re.sub(r"^\.", "_.", span).replace("…", "...")).body
    if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        check_option(ast.unparse(target), statement.value)
    else:
        assert isinstance(statement, ast.Expr)
        if isinstance(statement.value, ast.Call):
            check_call(statement.value)
        else:
            check_name(ast.unparse(statement.value))


def test_rows() -> None:
    """Each row has two cells, and each policy is among them."""
    assert len(HERE) > 20
    assert all(len(row) == 2 and all(row) for row in ROWS)
    text = " ".join(row[0] for row in HERE)
    missing = [
        kind.__name__ for kind, name in KINDS.items() if f"{kind.__name__}(" not in text and f'"{name}"' not in text
    ]
    assert [] == missing
