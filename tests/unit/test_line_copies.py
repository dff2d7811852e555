"""Delayed copies of messages that wait in line, when the task has changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock.worker.republish import RETRY_STATE_HEADER, RetryState
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]
TICKET = RetryState(ticket="t", copy=1.0)
COPY = {RETRY_STATE_HEADER: TICKET._replace(stands_for="id-1")._asdict()}


@pytest.fixture(autouse=True)
def _forget_results(app: Celery) -> None:
    """All apps of a process share the results in memory."""
    app.backend.client.cache.clear()


def from_copy(task: Any, *args: Any) -> Any:
    """Deliver a copy; return the message that it publishes, None if it publishes none."""
    with task.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        assert "IGNORED" == deliver(task, *args, task_id="copy", headers=COPY).info.state
        return queue.get_nowait() if queue.qsize() else None


def test_singleton_switched_off(singleton: Singleton, app: Celery) -> None:
    """Messages that wait while `singleton_singleton` becomes False run once, under their own task id; others are plain."""
    ran = []
    app.conf.singleton_singleton = False

    @singleton(name="x", on_duplicate="wait", bind=True)
    def task(self: Any) -> None:
        ran.append((self.request.id, self.lease.protected))

    message = from_copy(task)
    assert [] == ran
    assert "id-1" == message.headers["id"]
    deliver(task, headers={RETRY_STATE_HEADER: message.headers[RETRY_STATE_HEADER]})
    assert from_copy(task) is None
    deliver(task, task_id="id-2")
    assert [("id-1", True), ("id-2", False)] == ran


def test_arguments_that_do_not_fit_any_more(singleton: Singleton, app: Celery) -> None:
    """A message in line whose signature cannot be made any more fails under its own task id."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    assert from_copy(task, "one too many") is None
    assert isinstance(app.AsyncResult("id-1").result, TypeError)


def test_limit_that_fails(singleton: Singleton, app: Celery) -> None:
    """A message in line whose `lock_limit` raises an error fails under its own task id."""

    def limit() -> int:
        raise KeyError("plan")

    @singleton(name="x", on_duplicate="wait", lock_limit=limit)
    def task() -> None: ...

    assert from_copy(task) is None
    assert isinstance(app.AsyncResult("id-1").result, KeyError)
