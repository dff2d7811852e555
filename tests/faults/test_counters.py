"""Tests of the comparison of counters: made-up histories of one task, and its statistics."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.store.records import Statistics
from tests.faults.counters import disagreements
from tests.faults.ledger import Event
from tests.faults.schedule import Fault
from tests.faults.test_checker import body, event, store

KEY = "singleton:{job}:lock:1"


def run(name: str, start: float, end: float, how: str = "return") -> list[Event]:
    """Return the events of one body, with its grant and its release."""
    taken = {**store(start, "acquire", name, "take"), "new": True}
    return [taken, *body(name, start, end, how), store(end + 0.1, "release", name, "free")]


def refused(name: str, at: float) -> list[Event]:
    """Return the events of a first call that is a duplicate."""
    call = {**store(at, "acquire", name), "sent": True, "policy": "wait"}
    told = event("duplicate", at + 0.1, key=KEY, task_id=f"task-{name}", policy="wait")
    return [event("sent", at - 0.1, task_id=f"task-{name}", expect="any"), call, told]


def wrong(events: list[Event], *faults: Fault, **counters: int) -> list[str]:
    """Return which counters are wrong, without their numbers."""
    named = {name.replace("_", ":"): count for name, count in counters.items()}
    found = disagreements(sorted(events, key=lambda e: e["at"]), faults, [Statistics("job", named)])
    return [text.split()[1] for text in found if "began" not in text]


def test_releases_by_outcome() -> None:
    """Each release counts for the end of its body; one after a kill may be the main process's."""
    events: list[Any] = [*run("a", 1, 2), *run("b", 3, 4, "Boom"), *run("c", 5, 6, "SystemExit")]
    right = {"acquired": 3, "released_success": 1, "released_failure": 1, "released_other": 1}
    assert [] == wrong(events, **right)
    assert ["released:failure", "released:success"] == sorted(
        wrong(events, **{**right, "released_success": 2, "released_failure": 0})
    )
    late = {**right, "released_success": 0, "released_other": 2}
    assert ["released:other", "released:success"] == sorted(wrong(events, **late))
    assert [] == wrong(events, Fault("kill", 2, pids=frozenset({1})), **late)
    assert [] == wrong([*events, event("store reset", 7)])


def test_duplicates_by_policy() -> None:
    """Each message counts once: those that a signal named at least, and the first calls that were refused at most."""
    events = [*refused("a", 1), *refused("b", 2)]
    assert [] == wrong(events, duplicates_wait=2)
    assert ["duplicates:skip"] == wrong(events, duplicates_wait=2, duplicates_skip=1)
    assert ["duplicates:wait"] == wrong(events, duplicates_wait=1) == wrong(events, duplicates_wait=3)
    assert [] == wrong([*events, *refused("c", 3)[:2]], duplicates_wait=3)
    assert [] == wrong([*events, event("store error", 2, task_id="task-b", key=KEY)], duplicates_wait=1)
    joins = {**store(3.2, "acquire", "c"), "sent": True}  # the lock is free by then
    assert [] == wrong(
        [*events, *refused("c", 3), joins, *run("c", 3.3, 4)], duplicates_wait=3, acquired=1, released_success=1
    )
    assert [] == wrong([*events, *run("c", 5, 6)], duplicates_wait=2, acquired=1, released_success=1)
