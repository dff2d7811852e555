"""The message that the line keeps: it is noted when it begins to wait, and published as it is when its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish
from kombu.serialization import registry

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER
from celery_singleton_lock.line import dispatch
from celery_singleton_lock.line.dispatch import Retries
from celery_singleton_lock.line.message import LineMessage
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus
from celery_singleton_lock.testing import locked
from tests.servers import until
from tests.unit.conftest import MakeApp
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
    with locked(task, day):
        assert "IGNORED" == deliver(task, day, headers={"tenant": "t1"}).info.state
        (copy,) = take()
    (message,) = take()
    assert copy.headers[RETRY_STATE_HEADER]["original_id"] == "id-1" == message.headers["id"]
    assert ("t1", None, "") == (
        message.headers["tenant"],
        message.headers["eta"],
        message.headers[RETRY_STATE_HEADER]["original_id"],
    )
    assert [[day], {}] == message.payload[:2]
    assert "celery" == message.delivery_info["routing_key"]


def test_message_that_expires(singleton: Singleton, take: Callable[[], list[Any]]) -> None:
    """The header `expires` stays. The broker's own expiry, which would count anew from the publish, is left out."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    expires = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    with locked(task):
        deliver(task, expires=expires)
        take()
    (message,) = take()
    assert (expires, None) == (message.headers["expires"], message.properties.get("expiration"))


def test_events_of_sent_tasks(singleton: Singleton, app: Celery, take: Callable[[], list[Any]]) -> None:
    """With `task_send_sent_event`, the line keeps the message, and not the event that Celery publishes after it."""
    app.conf.task_send_sent_event = True

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    with locked(task):
        deliver(task)
        take()
    (message,) = take()
    assert "x" == message.headers["task"]


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_bytes_of_a_message(
    singleton: Singleton, take: Callable[[], list[Any]], serializer: str, compression: str | None
) -> None:
    """The end of the holder publishes a message of hundreds of kilobytes as it was, in whatever form it has."""
    if serializer == "yaml":
        pytest.importorskip("yaml")

    @singleton(name="x", on_duplicate="wait", serializer=serializer, unique_on=[])
    def task(text: str) -> None: ...

    argument = "é" * 100_000
    more = {"compression": compression} if compression else {}
    with locked(task, argument):
        deliver(task, argument, **more)
        take()
    (message,) = take()
    message.accept = {message.content_type}
    assert registry.name_to_type[serializer] == message.content_type
    assert (argument,) == tuple(message.decode()[0])
    assert ("compression" in message.headers) is (compression is not None)


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"odd": 1j}, "waits in line, and only a delayed copy can start it: "),
        ({"long": "x" * 2000}, "bytes, more than singleton_lock_max_message"),
    ],
    ids=["header that json cannot express", "too long"],
)
def test_message_that_only_its_copy_starts(
    make_app: MakeApp, headers: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the holder does not publish it; the lock is free. A WARNING says why."""
    app = make_app(singleton_lock_max_message=2000, singleton_lock_eager=True)

    @app.task(base=SingletonTask, name="x", on_duplicate="wait", shared=False)
    def task() -> None: ...

    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        with locked(task):
            deliver(task, headers=headers)
            assert 1 == queue.qsize()
            queue.clear()
        assert 0 == queue.qsize()
    assert task.lock_holder() is None
    assert [why in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]


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
        with locked(task):
            deliver(task)
            take()
        (message,) = take()
    finally:
        before_task_publish.disconnect(add)
    assert (2, "id-1", 1) == (len(seen), seen[0], message.headers["trace"])


def test_publication_that_fails(
    singleton: Singleton, app: Celery, take: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that could not be published gives its turn back at once, and is published as soon as that is possible, once."""
    monkeypatch.setattr(dispatch, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(dispatch, "LONGEST_RETRY", 0.01)
    send, is_away, tries = dispatch._send, [True], []

    def fail(app: Celery, message: LineMessage) -> None:
        tries.append(message.place.copy)
        if is_away or len(tries) < 3:
            raise OSError("the broker is away")
        send(app, message)

    monkeypatch.setattr(dispatch, "_send", fail)

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    with locked(task):
        deliver(task)
        take()
    assert task.lock_holder() is None
    until(lambda: len(tries) > 3, "it is tried again")
    is_away.clear()
    (message,) = until(take, "it is published")
    assert "id-1" == message.headers["id"]
    assert len(set(tries)) == len(tries)  # each has a number of its own, so that only one of them runs
    assert task.lock_holder().task_id == "id-1"
    state = message.headers[RETRY_STATE_HEADER]
    assert deliver(task, headers={RETRY_STATE_HEADER: state}).info is None  # it runs
    assert "IGNORED" == deliver(task, headers={RETRY_STATE_HEADER: {**state, "copy": tries[0]}}).info.state


def failed_publication(
    task: Any, take: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Retries, LineMessage]:
    """Have the publication of a message in its turn fail; return what tries it again, and what it publishes then."""

    def fail(app: Celery, message: LineMessage) -> None:
        raise OSError("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_send", fail)
        with locked(task):
            deliver(task)
            take()
    retries = dispatch._retries_of(task.app)
    ((_, _, message),) = retries._waiting.values()
    retries._waiting.clear()  # no thread tries
    return retries, message


def test_message_that_started_before_its_retry(
    singleton: Singleton, take: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given back after a failed publication may run before the process that failed tries again: it runs once."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    retries, message = failed_publication(task, take, monkeypatch)
    deliver(task, task_id="newcomer")  # publishes it
    for task_id in ("id-1", "newcomer"):
        (state,) = [one.headers[RETRY_STATE_HEADER] for one in take() if one.headers["id"] == task_id]
        assert deliver(task, task_id=task_id, headers={RETRY_STATE_HEADER: state}).info is None  # it runs
    retries._try_again(message, 1.0)
    assert [] == take()


def test_retry_that_is_told_another_message(
    singleton: Singleton, take: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that tries again, and is told another message, whose turn it is, publishes that one, as anybody does."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    retries, message = failed_publication(task, take, monkeypatch)
    headers = {**message.options["headers"], "id": "other"}
    other = message._replace(options={**message.options, "headers": headers}).text
    answer = AcquireResult(AcquireStatus.REFUSED, message=other)
    monkeypatch.setattr(context_of(task.app).store, "acquire", lambda spec: answer)
    retries._try_again(message, 1.0)
    assert ["other"] == [one.headers["id"] for one in take()]
