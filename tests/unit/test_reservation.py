"""Reservations that messages name, and those whose messages have ended."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, uuid
from celery.states import EXCEPTION_STATES, PENDING, READY_STATES, RETRY, STARTED

from celery_singleton_lock.context import context_of
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.reservation import RESERVATION_HEADER, has_ended, reservation_of
from celery_singleton_lock.store.keys import queued_token
from tests.unit.test_task import Singleton

LOCK = "singleton:{app.sync}:lock:0123"


def test_reservation_that_a_message_names() -> None:
    """Lock, slot and task id are known without the task. The lock key may have the separator in the task's name."""
    base = "a:lock:b:{x:lock:y}"
    found = reservation_of({"id": "id-1", RESERVATION_HEADER: [f"{base}:lock:0123", 3, 30.0]}, "a:lock:b")
    assert found is not None
    assert (base, "0123", queued_token("id-1"), 3, 30.0) == (
        found.base,
        found.digest,
        found.token,
        found.limit,
        found.ttl,
    )


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"id": "id-1"},
        {RESERVATION_HEADER: [LOCK, 0, 30]},
        {"id": "id-1", RESERVATION_HEADER: "text"},
        {"id": "id-1", RESERVATION_HEADER: [LOCK, "x", 30]},
        {"id": "id-1", RESERVATION_HEADER: [7, 0, 30]},
        {"id": "id-1", RESERVATION_HEADER: ["another:key", 0, 30]},
        {"id": "id-1", RESERVATION_HEADER: ["other:{app.sync}:lock:0123", 0, 30]},
    ],
)
def test_message_that_names_none(headers: Any) -> None:
    """A header that somebody else made, or that concerns keys of others, is no reservation."""
    assert reservation_of(headers, "singleton") is None


@pytest.mark.parametrize("state", [*sorted(READY_STATES), PENDING, STARTED, RETRY])
def test_state_of_a_message(singleton: Singleton, app: Celery, state: str) -> None:
    """A message has ended if its state is final. A body that runs has not, whatever is stored."""

    @singleton(name="x", lock_from="publish")
    def task() -> None: ...

    task_id = uuid()
    app.backend.store_result(task_id, Exception() if state in EXCEPTION_STATES else None, state)
    assert (state in READY_STATES) is has_ended(task, Holder(task_id, state="queued"))
    assert not has_ended(task, Holder(task_id, state="running"))


def test_backend_that_cannot_be_asked(singleton: Singleton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the message counts as one that waits."""

    @singleton(name="x", lock_from="publish")
    def task() -> None: ...

    def fail(task_id: str) -> str:
        raise OSError("the backend is away")

    monkeypatch.setattr(task.backend, "get_state", fail)
    assert not has_ended(task, Holder("id-1", state="queued"))


def test_message_names_its_reservation(singleton: Singleton, app: Celery) -> None:
    """A message that was published with its lock names it in a header; one that met another has no such header."""

    @singleton(name="x", lock_from="publish", on_duplicate="retry", lock_limit=2)
    def task() -> None: ...

    headers = []
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        for _ in range(3):
            task.apply_async(headers={"mine": 1})
            headers.append(queue.get(timeout=5).headers)
    assert [1, 1, 1] == [one["mine"] for one in headers]
    assert [[task.lock_key_for(), 2, 30.0]] * 2 == [one[RESERVATION_HEADER] for one in headers[:2]]
    assert RESERVATION_HEADER not in headers[2]
    found = reservation_of(headers[0], context_of(app).settings.prefix)
    assert found is not None
    context_of(app).store.release(found, success=False)
    assert task.delay().duplicate is None
