"""The tests of a failover find pairs of bodies that run at once, and whether one of them was notified."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.failover import FAULTS, Pair, pairs_of
from tests.faults.ledger import Event
from tests.faults.matrix import test_failover as matrix

pytestmark = pytest.mark.harness


def body(run: str, start: float, end: float, work: str = "w") -> list[Event]:
    """Return the events of a body."""
    return [event("start", start, run, work), event("end", end, run, work)]


def event(what: str, at: float, run: str, work: str = "w") -> Event:
    found: dict[str, Any] = {"what": what, "at": at, "run": run, "work": work, "pid": 1}
    return found


def test_one_after_the_other() -> None:
    """A body that begins as the one before ends is no pair; nor are bodies of different work."""
    assert not pairs_of([*body("a", 1, 2), *body("b", 2, 3), *body("c", 2.5, 4, "other")])


def test_pairs() -> None:
    """Each pair of three bodies at once is found, with the time that it lasts."""
    found = pairs_of([*body("a", 1, 5), *body("b", 2, 4), *body("c", 3, 8)])
    assert [Pair(2, 2, None), Pair(3, 2, None), Pair(3, 1, None)] == found


def test_told() -> None:
    """A pair is told when the first of its bodies learns that it has lost its lock. That may be before the pair begins."""
    bodies = [*body("a", 1, 5), *body("b", 2, 4)]
    assert [Pair(2, 2, 1)] == pairs_of([*bodies, event("lost", 3, "a"), event("lost", 3.5, "b")])
    assert [Pair(2, 2, -0.5)] == pairs_of([*bodies, event("lost", 1.5, "a")])


def test_bodies_that_go_on() -> None:
    """A body without an end still runs."""
    (pair,) = pairs_of([event("start", 1, "a"), *body("b", 2, 4)])
    assert Pair(2, 2, None) == pair


def test_all_faults_have_a_row() -> None:
    """The matrix has a row for each fault."""
    rows = matrix.test_failover.pytestmark[0].args[1]
    assert set(FAULTS) == {getattr(row, "values", row)[1] for row in rows}
