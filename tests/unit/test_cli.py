"""What the commands of `celery singleton` do without a store: durations, the health that `check` finds, tables."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from celery_singleton_lock.cli import output, singleton
from celery_singleton_lock.cli.check import line_of
from celery_singleton_lock.cli.duration import DURATION, Duration
from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.locks.health import CRITICAL, OK, WARNING, Bounds, evaluate
from celery_singleton_lock.store.records import Statistics
from tests.unit.site import OTHERS, PAGES, name_of

NOW = 1_700_000_000.0
KEY = f"singleton:{{shop.tasks.{'sync' * 20}}}:lock:{'0' * 32}"


# -- durations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("30m", 1800), ("45s", 45), ("1d", 86400), ("90", 90), ("1.5h", 5400), ("0", 0)]
)
def test_duration(text: str, seconds: float) -> None:
    """A number has a unit, or means seconds."""
    assert seconds == DURATION.convert(text, None, None)


@pytest.mark.parametrize("text", ["", "h", "-1", "1y", "1 h", "2h\n", "nan", "inf", "1e3", "tcp://10.0.0.1:80", "٣h"])
def test_no_duration(text: str) -> None:
    """Anything else is refused, with examples."""
    with pytest.raises(click.BadParameter, match="is no duration: 45s, 30m, 2h, 1d, or a number of seconds"):
        DURATION.convert(text, None, None)


def test_zero() -> None:
    """0 is refused where it has no meaning."""
    with pytest.raises(click.BadParameter):
        Duration(zero=False).convert("0s", None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (9.94, "9.9s"), (59.4, "59s"), (60, "1m"), (3599.6, "1h"), (5400, "1h30m"), (90061, "1d1h")],
)
def test_duration_text(seconds: float, text: str) -> None:
    """A duration is written with its two highest units."""
    assert text == duration_text(seconds)


# -- check -------------------------------------------------------------------------------------


def one(task: str = "sync", oldest: float = 0.0, blocked: int = 0, running: int = 0, **counters: int) -> Statistics:
    counters = {name.replace("__", ":"): count for name, count in counters.items()}
    return Statistics(task, counters, {"running": running}, oldest, blocked)


def status(found: Statistics, named: Any = (), **bounds: float) -> int:
    return evaluate([found], Bounds(**bounds), named, NOW).status


@pytest.mark.parametrize(
    ("bound", "at"),
    [
        ("max_age", lambda value: one(oldest=NOW - value)),
        ("max_blocked", lambda value: one(blocked=value)),
        ("max_lost", lambda value: one(lost__expired=value - 1, lost__not_owner=1)),
        ("no_success_for", lambda value: one(last_start=1, last_success=int(NOW - value) * 1000)),
    ],
)
def test_bounds(bound: str, at: Any) -> None:
    """A value above its bound is a warning, and above twice its bound it is critical."""
    for value, expected in ((10, OK), (11, WARNING), (20, WARNING), (21, CRITICAL)):
        assert expected == status(at(value), **{bound: 10})
        assert OK == status(at(value))


def test_bound_of_zero() -> None:
    """Where nothing is allowed, anything is critical."""
    assert (OK, CRITICAL) == (status(one(), max_lost=0), status(one(lost__expired=1), max_lost=0))
    assert OK == status(one(lost__released_by_operator=1), max_lost=0), "that was an operator"


def test_no_success_yet() -> None:
    """A task without success is critical once it has started or is named; while its first body runs, its age counts."""
    assert OK == status(one(), no_success_for=10)
    assert CRITICAL == status(one(), ["sync"], no_success_for=10)
    assert CRITICAL == status(one(last_start=1, released__failure=1), no_success_for=10)
    first = [one(last_start=1, oldest=NOW - age, running=1) for age in (9, 11, 21)]
    assert [OK, WARNING, CRITICAL] == [status(found, no_success_for=10) for found in first]
    again = one(last_start=1, oldest=NOW - 1, running=1, expired=1)
    assert CRITICAL == status(again, no_success_for=10)


def test_store_that_has_just_started() -> None:
    """Where no success is known, the time counts from the start of the store: no bound is passed right after it."""
    failed, named = one(last_start=1, released__failure=1), one()
    for found, names in ((failed, ()), (named, ["sync"])):
        for up, expected in ((9, OK), (11, WARNING), (21, CRITICAL)):
            health = evaluate([found], Bounds(no_success_for=10), names, NOW, store_start=NOW - up)
            assert expected == health.status
            assert (up, up > 10) == (
                health.values["since_success"],
                "no success since the store started, " in health.text,
            )


def test_line() -> None:
    """The line names the worst problem first, and the numbers are those of the worst task; no text is taken for numbers."""
    tasks = [one("a|\n", oldest=NOW - 15, running=2), one("b", blocked=30, last_start=1, released__failure=1)]
    health = evaluate(tasks, Bounds(max_age=10, max_blocked=5, no_success_for=60), (), NOW)
    text, _, numbers = line_of(health).partition(" | ")
    assert (
        "SINGLETON CRITICAL - b: a holder has met 30 duplicates; b: no success yet; a/\\n: a lock is held for 15s"
        == text
    )
    assert "locks=2;;;0 oldest=15s;10;20;0 blocked=30;5;10;0 lost=0c;;;0 since_success=U;60;120;0" == numbers
    assert {"locks": 2, "oldest": 15, "blocked": 30, "lost": 0, "since_success": None} == health.values
    assert math.inf not in health.values.values(), "JSON has none"


# -- tables ------------------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "plain terminal", "dumb", "xterm"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write to a pipe, or to a terminal of 40 columns, with rich or without."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: request.param != "pipe", raising=False)
    if request.param == "plain terminal":
        monkeypatch.setattr(output, "find_spec", lambda name: None)
    for name, value in {"TERM": request.param, "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return str(request.param)


def test_keys_stay_whole(terminal: str) -> None:
    """A key is in one line, whatever the output is; only on a capable terminal with rich there are colours."""
    if terminal == "xterm":
        pytest.importorskip("rich")
    text = output.table_text(("STATE", "KEY"), [("running", KEY), ("cooldown", "b")])
    assert 3 == len(text.splitlines())
    assert KEY in text
    assert (terminal == "xterm") is ("\x1b[" in text)


def test_cells(terminal: str) -> None:
    """Errors of tasks cannot steer the terminal or break a line, are no markup, and an empty cell is a dash."""
    text = output.table_text(("ERROR", "NODE"), [("a\x1b[2J\nb [red]c[/red]", "")])
    assert "a\\x1b[2J\\nb [red]c[/red]" in text
    assert "-" == text.splitlines()[1].split()[-1].removesuffix("\x1b[0m")


# -- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [*PAGES, *OTHERS], ids=name_of)
def test_documents(document: Path) -> None:
    """Each command in the documents has the options and arguments that it is shown with."""
    text = document.read_text(encoding="utf-8")
    for line in re.findall(r"celery -A [a-z]\w* singleton ([^`\n]+)", text):
        name, *words = shlex.split(line)
        command = singleton.commands[name]
        command.make_context(name, words)
