"""`lock_at_least`: after a success the lock stays held for a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError, DuplicateTask, SingletonTask, StoreUnavailable, signals
from celery_singleton_lock.config.task_config import refuse_wrong
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.requests import AfterRelease
from celery_singleton_lock.testing import assert_free, assert_held
from tests.unit import test_execution
from tests.unit.conftest import MakeApp
from tests.unit.fake_store import FakeStore
from tests.unit.test_execution import MovableClock, recorded, renew_due
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]
clock, store = test_execution.clock, test_execution.store


@pytest.fixture(autouse=True)
def _forget_results(app: Any) -> None:
    """All apps of a process share the results in memory."""
    app.backend.client.cache.clear()


def remaining_cooldown(task: Any) -> float:
    """Return for how many seconds nobody may run the task, though no body runs."""
    holder = assert_held(task)
    assert ("cooldown", "id-1") == (holder.state, holder.task_id)
    return holder.remaining


@pytest.mark.parametrize("is_eager", [False, True], ids=["delivery", "eager"])
def test_held_after_a_success(singleton: Singleton, store: FakeStore, clock: MovableClock, is_eager: bool) -> None:
    """A success leaves the lock held until `lock_at_least` after the start; the lease itself is released."""

    @singleton(name="x", lock_at_least=3600, on_duplicate="raise")
    def task() -> str:
        clock.advance(20)
        return "ran"

    def run(task_id: str) -> Any:
        if is_eager:
            return task.apply(task_id=task_id).result
        deliver(task, task_id=task_id)
        return task.AsyncResult(task_id).result

    with recorded(signals.lock_released) as released:
        assert "ran" == run("id-1")
    assert ["lock_released"] == released
    assert 3579 < remaining_cooldown(task) <= 3580
    duplicate = run("id-2")
    assert isinstance(duplicate, DuplicateTask)
    assert "cooldown" == duplicate.holder.state
    clock.advance(3580)
    assert "ran" == run("id-3")


def test_nothing_is_held_after_a_long_body(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A body that took longer than `lock_at_least` frees the lock at once."""

    @singleton(name="x", lock_at_least=10, lock_ttl=60)
    def task() -> None:
        clock.advance(10.5)

    deliver(task)
    assert_free(task)


@pytest.mark.parametrize("end", ["failure", "retry", "loss", "revocation"])
def test_no_cooldown_without_a_success(singleton: Singleton, store: FakeStore, clock: MovableClock, end: str) -> None:
    """A failure, a retry, or a lost lease frees the lock at once."""

    @singleton(name="x", bind=True, lock_at_least=3600, lock_ttl=30)
    def task(self: Any) -> None:
        if end == "failure":
            raise ValueError("failed")
        if end == "retry":
            raise self.retry(countdown=60)
        if end == "revocation":
            self.force_unlock()
        clock.advance(31)
        renew_due(task)  # finds it lost and, unless it was revoked, reacquires it
        assert not self.lease.held

    deliver(task)
    assert_free(task)


def test_cooldown_of_a_pending_release(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A release that comes late leaves the rest of the cooldown; one that comes too late leaves none."""

    @singleton(name="x", lock_at_least=100, lock_ttl=1000)
    def task() -> None:
        store.failure = StoreUnavailable("unreachable")

    for late, rest in ((40, 60), (101, 0)):
        deliver(task)
        clock.advance(late)
        store.failure = None
        renew_due(task)
        if rest:
            assert rest - 1 < remaining_cooldown(task) <= rest
            clock.advance(rest)
        assert_free(task)


def test_cooldown_of_an_unanswered_release(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A release that was executed without an answer, and is sent again, leaves the same cooldown."""

    @singleton(name="x", bind=True, lock_at_least=100)
    def task(self: Any) -> None:
        request = self.lease._state.spec

        def release() -> None:
            MemoryStore.release(store, request, True, kept=AfterRelease("cooldown", 100.0))
            raise StoreUnavailable("no answer")

        store.on_release = [release]

    deliver(task)
    clock.advance(40)
    renew_due(task)
    assert 59 < remaining_cooldown(task) <= 60


def test_body_that_outlives_lock_at_most(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A body that outlives its option loses its lease, whose lock it still releases; no cooldown follows."""
    seen: list[Any] = []

    @singleton(name="x", bind=True, lock_ttl=30, lock_at_least=5, lock_at_most=60)
    def task(self: Any) -> None:
        for _ in range(59):
            clock.advance(1)
            renew_due(task)
        seen.append(self.lease.held)
        clock.advance(1)
        renew_due(task)
        seen.append(self.lease.held)
        assert_held(task)

    deliver(task)
    assert [True, False] == seen
    assert_free(task)
    assert math.inf == renew_due(task)


# -- duplicates ------------------------------------------------------------------------------------


def published(task: Any, outcome: Callable[[], Any]) -> tuple[str, float]:
    """Return the state of a delivery that publishes its message again, and the delay of that message in seconds."""
    with task.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        state = outcome().info.state
        headers = queue.get(timeout=5).headers
    return state, (datetime.fromisoformat(headers["eta"]) - datetime.now(timezone.utc)).total_seconds()


def test_retry_comes_back_after_the_cooldown(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A postponed duplicate in a cooldown comes back for its end."""

    @singleton(name="x", lock_at_least=600, on_duplicate="retry")
    def task() -> None: ...

    deliver(task)
    state, delay = published(task, lambda: deliver(task, task_id="id-2"))
    assert "RETRY" == state
    assert 595 < delay <= 600


REDELIVERED = {"delivery_info": {"redelivered": True}}


def test_redelivery_of_a_success_meets_its_cooldown(
    singleton: Singleton, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A redelivered message that had not waited is dropped if its first delivery stored SUCCESS."""
    ran = []

    @singleton(name="x", lock_at_least=600)
    def task() -> str:
        ran.append(1)
        return "first"

    deliver(task)
    caplog.set_level(logging.INFO, "celery_singleton_lock")
    assert "IGNORED" == deliver(task, **REDELIVERED).info.state
    assert "another delivery of it succeeded" in caplog.text
    assert ("SUCCESS", "first") == (task.AsyncResult("id-1").state, task.AsyncResult("id-1").result)
    assert [1] == ran


@pytest.mark.parametrize("options", [{"ignore_result": True}, {}], ids=["no result", "died before its result"])
def test_redelivery_of_an_unknown_outcome_meets_its_cooldown(
    singleton: Singleton, store: FakeStore, app: Any, clock: MovableClock, options: Any
) -> None:
    """Where no success is stored, a redelivery runs after the cooldown: its first delivery may have died after its body."""
    ran = []

    @singleton(name="x", lock_at_least=600, **options)
    def task() -> None:
        ran.append(1)

    deliver(task)
    app.backend.client.cache.clear()
    state, delay = published(task, lambda: deliver(task, **REDELIVERED))
    assert "IGNORED" == state
    assert 595 < delay <= 600
    clock.advance(600)
    deliver(task, headers={"singleton_retry_state": {"redelivery_checks": 1}})
    assert [1, 1] == ran


def test_backend_that_cannot_be_asked(singleton: Singleton, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result backend that fails does not lose a redelivered message."""

    @singleton(name="x", lock_at_least=600)
    def task() -> None: ...

    def get_state(task_id: str) -> str:
        raise NotImplementedError("no result backend")

    deliver(task)
    monkeypatch.setattr(task.backend, "get_state", get_state)
    assert 595 < published(task, lambda: deliver(task, **REDELIVERED))[1] <= 600


def test_task_id_that_is_used_again(singleton: Singleton, store: FakeStore) -> None:
    """New work under the task id of a cooldown is a duplicate, which the policy decides about."""

    @singleton(name="x", lock_at_least=600, on_duplicate="retry")
    def task() -> None: ...

    deliver(task)
    assert "RETRY" == deliver(task).info.state


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "most"), [(10, 10), (10, 5), (3600.0, 60.0)])
def test_cooldown_that_outlives_the_lease_is_refused(make_app: MakeApp, least: float, most: float) -> None:
    """`lock_at_most` must be above `lock_at_least`, as a lost lease leaves no cooldown."""
    cls = type("X", (SingletonTask,), {"name": "x", "lock_at_least": least, "lock_at_most": most})
    task = make_app().register_task(cls())
    with pytest.raises(ConfigurationError, match=r"task x: lock_at_most=.* with lock_at_least=.* it must be above"):
        refuse_wrong(task)


@pytest.mark.parametrize("expired", [False, True])
def test_call_during_a_hold_whose_result_has_expired(singleton: Singleton, app: Any, expired: bool) -> None:
    """A publisher answers with the run before the hold while its result is there; else the call is sent, and ends as skipped."""

    @singleton(name="x", lock_at_least=3600, lock_from="publish")
    def task() -> str:
        return "ran"

    deliver(task)
    assert "ran" == task.AsyncResult("id-1").result
    if expired:
        app.backend.client.cache.clear()
    answer = task.delay()
    assert "id-1" == answer.duplicate.task_id
    assert expired is (answer.id != "id-1")
    if expired:
        deliver(task, task_id=answer.id)
        assert ("SUCCESS", None) == (answer.state, answer.result)
