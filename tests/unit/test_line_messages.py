"""The message that the line keeps: it is noted when it begins to wait, and published as it is when its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish

from celery_singleton_lock.testing import hold
from celery_singleton_lock.worker.line import MAX_MESSAGE
from celery_singleton_lock.worker.republish import RETRY_STATE_HEADER
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]


@pytest.fixture
def take(app: Celery) -> Iterator[Callable[[], list[Any]]]:
    """Yield a function that takes all messages out of the queue."""
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        yield lambda: [queue.get_nowait() for _ in range(queue.qsize())]


def test_message_of_the_line(singleton: Singleton, take: Callable[[], list[Any]]) -> None:
    """The end of the holder publishes the message with its id, arguments and headers, into its queue; nothing else does."""

    @singleton(name="x", on_duplicate="wait")
    def task(day: datetime) -> None: ...

    day = datetime(2026, 11, 25, tzinfo=timezone.utc)
    with hold(task, day):
        assert "IGNORED" == deliver(task, day, headers={"tenant": "t1"}).info.state
        (copy,) = take()
    (message,) = take()
    assert copy.headers[RETRY_STATE_HEADER]["stands_for"] == "id-1" == message.headers["id"]
    assert ("t1", None, "") == (
        message.headers["tenant"],
        message.headers["eta"],
        message.headers[RETRY_STATE_HEADER]["stands_for"],
    )
    assert [[day], {}] == message.payload[:2]
    assert "celery" == message.delivery_info["routing_key"]


def test_message_that_expires(singleton: Singleton, take: Callable[[], list[Any]]) -> None:
    """The header `expires` stays. The broker's own expiry, which would count anew from the publish, is left out."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    expires = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    with hold(task):
        deliver(task, expires=expires)
        take()
    (message,) = take()
    assert (expires, None) == (message.headers["expires"], message.properties.get("expiration"))


def test_events_of_sent_tasks(singleton: Singleton, app: Celery, take: Callable[[], list[Any]]) -> None:
    """With `task_send_sent_event`, the line keeps the message, and not the event that Celery publishes after it."""
    app.conf.task_send_sent_event = True

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    with hold(task):
        deliver(task)
        take()
    (message,) = take()
    assert "x" == message.headers["task"]


@pytest.mark.parametrize(
    "options",
    [{"serializer": "pickle"}, {"headers": {"long": "x" * MAX_MESSAGE}}, {"headers": {"odd": 1j}}],
    ids=["not json", "too long", "header that json cannot express"],
)
def test_message_that_only_its_copy_starts(
    singleton: Singleton, take: Callable[[], list[Any]], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the holder does not publish it; the lock is free. Why is logged, if the documents do not say it."""

    @singleton(name="x", on_duplicate="wait", serializer=options.get("serializer", "json"))
    def task() -> None: ...

    with hold(task):
        deliver(task, headers=options.get("headers") or {})
        assert 1 == len(take())
    assert [] == take()
    assert task.lock_holder() is None
    odd = "Task x[id-1] waits in line, and only a delayed copy can start it: "
    assert ("odd" in options.get("headers", {})) == any(one.message.startswith(odd) for one in caplog.records)


def test_receivers_see_each_message_once(singleton: Singleton, take: Callable[[], list[Any]]) -> None:
    """A receiver of `before_task_publish` may add a header: it sees the message when it begins to wait, and not again."""
    seen = []

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    def add(headers: dict[str, Any], **_: Any) -> None:
        seen.append(headers["id"])
        headers["trace"] = len(seen)

    before_task_publish.connect(add)
    try:
        with hold(task):
            deliver(task)
            take()
        (message,) = take()
    finally:
        before_task_publish.disconnect(add)
    assert (2, "id-1", 2) == (len(seen), seen[1], message.headers["trace"])
