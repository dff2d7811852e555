"""`max_starts`: a call whose lock key was started too often is refused."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError, MaxStarts, StoreUnavailable, TooManyStarts
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.testing import assert_free
from tests.unit import test_execution
from tests.unit.fake_store import FakeStore
from tests.unit.test_execution import MovableClock, lose_to_another, raising, renew_due
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]
clock, store = test_execution.clock, test_execution.store


def crash(task: Any, store: FakeStore, clock: MovableClock) -> None:
    """Start the task as a worker does that dies at once."""
    config = config_for(task)
    request = LeaseSpec(config.base, config.digest((), {}), str(clock()), 1.0, max_starts=config.options.max_starts)
    store.acquire(request)
    clock.advance(1.1)


def ends(task: Any, times: int) -> list[str]:
    """Deliver the task, and return the state or the error of each run."""
    outcomes = [deliver(task, task_id=f"id-{number}") for number in range(times)]
    return [type(one.info.retval).__name__ if one.info else one.retval for one in outcomes]


def test_poison_fails(
    singleton: Singleton, store: FakeStore, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Past the limit a delivery fails with an error that names key and count, is logged, and takes no lock."""

    @singleton(name="x", max_starts=2, autoretry_for=(Exception,), max_retries=3)
    def task() -> str:
        return "ran"

    for _ in range(2):
        crash(task, store, clock)
    outcome = deliver(task)
    assert "FAILURE" == outcome.info.state
    stored = task.AsyncResult("id-1").result
    assert isinstance(stored, TooManyStarts)
    assert (task.lock_key_for(), 2, "crashed") == (stored.key, stored.starts, stored.count)
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [f"Task x[id-1] failed: {stored}"] == warnings
    assert TooManyStarts in task.throws
    assert_free(task)
    clock.advance(86400)
    assert ["ran"] == ends(task, 1)


@pytest.mark.parametrize("end", ["success", "failure", "retry", "exit", "loss"])
def test_seen_ends_do_not_count(singleton: Singleton, store: FakeStore, end: str) -> None:
    """A start counts no more once its body has ended, however it ended, also after its lock was revoked."""

    @singleton(name="x", bind=True, max_starts=1, max_retries=None)
    def task(self: Any) -> None:
        ran.append(1)
        if end == "failure":
            raise ValueError("failed")
        if end == "retry":
            raise self.retry(countdown=60)
        if end == "exit":
            raise SystemExit(3)
        if end == "loss":
            lose_to_another(task, self.lease)

    ran: list[int] = []
    for number in range(3):
        with suppress(SystemExit):
            deliver(task, task_id=f"id-{number}")
        task.force_unlock()
    assert [1] * 3 == ran


def test_end_of_a_revoked_start_is_told_later(singleton: Singleton, store: FakeStore) -> None:
    """If the store is away when the body of a revoked lock ends, its end is noted as soon as the store is back."""

    @singleton(name="x", bind=True, max_starts=1)
    def task(self: Any) -> str:
        if not store.released:
            lose_to_another(task, self.lease)
            store.failure = StoreUnavailable("unreachable")
        return "ran"

    deliver(task)
    store.failure = None
    task.force_unlock()
    renew_due(task)
    assert "ran" == deliver(task, task_id="id-2").retval


def test_unsuccessful(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """`unsuccessful` counts starts since the last success, for a time."""

    @singleton(name="x", max_starts=MaxStarts(3, per=3600.0, count="unsuccessful"))
    def task() -> str:
        if outcomes.pop(0):
            return "ran"
        raise ValueError("failed")

    outcomes = [False, False, True, False, False, False]
    assert ["ValueError"] * 2 + ["ran"] + ["ValueError"] * 3 + ["TooManyStarts"] * 2 == ends(task, 8)
    clock.advance(3600)
    outcomes.append(True)
    assert ["ran"] == ends(task, 1)


def test_force_unlock_forgets_starts(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """After `force_unlock` a refused call starts again; that of another call stays refused."""

    @singleton(name="x", max_starts=MaxStarts(1, count="unsuccessful"))
    def task(a: int) -> None:
        raise ValueError("failed")

    def states() -> list[str]:
        return [type(task.apply((a,)).result).__name__ for a in (1, 2)]

    assert ["ValueError"] * 2 == states()
    assert ["TooManyStarts"] * 2 == states()
    assert task.force_unlock(1) is None
    assert ["ValueError", "TooManyStarts"] == states()


@pytest.mark.parametrize("count", ["crashed", "unsuccessful"])
def test_unanswered_acquire_is_no_start(singleton: Singleton, store: FakeStore, count: str) -> None:
    """A start that the store noted without an answer does not count: no body ran."""

    @singleton(name="x", max_starts=MaxStarts(1, count=count))
    def task() -> str:
        return "ran"

    for _ in range(3):
        store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
        assert "RETRY" == deliver(task).info.state
        renew_due(task)
    assert "ran" == deliver(task).retval


def test_number_stands_for_crashed_starts_of_a_day() -> None:
    """The defaults are the documented ones."""
    assert MaxStarts(3, per=86400.0, count="crashed") == MaxStarts(3)


def test_max_starts_is_a_value() -> None:
    """It equals its copies, survives pickle, shows its options, and cannot be changed."""
    limit = MaxStarts(3, 60, "unsuccessful")
    assert limit == pickle.loads(pickle.dumps(limit)) == copy.deepcopy(limit) == eval(repr(limit))
    with pytest.raises(dataclasses.FrozenInstanceError):
        limit.n = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, -1, 1.5, "3", None, True)),
        *(("per", value) for value in (0, 0.5, -1, math.inf, math.nan, 1e17, "60", None, True)),
        *(("count", value) for value in ("failed", "", None, 1)),
    ],
)
def test_bad_values_are_refused(name: str, value: Any) -> None:
    """A value that is out of range is refused; the error shows its name and the value."""
    with pytest.raises(ConfigurationError) as refused:
        MaxStarts(**{"n": 3, name: value})
    assert f"MaxStarts: {name}={value!r}" in str(refused.value)
