"""The way from processes of a pool to their main process: what it refuses, and what is published instead."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu.asynchronous import Hub

from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.line.dispatch import HAND_OVER, publish_next
from celery_singleton_lock.line.handover import MAX_MESSAGE, HandOver
from celery_singleton_lock.line.message import LineMessage
from tests.servers import until

#: A queue for each test: what one leaves on its way is published after its end.
QUEUES = (f"queue-{number}" for number in count())


@pytest.fixture
def queue() -> str:
    return next(QUEUES)


def text_of(queue: str, number: int, size: int = 0, task: str = "x") -> str:
    """Return a message as the line keeps it."""
    state = RetryState(ticket=f"ticket-{number}", copy=0.5)._asdict()
    headers = {"task": task, "id": f"id-{number}", "more": "x" * size, RETRY_STATE_HEADER: state}
    options = {"exchange": "", "routing_key": queue, "headers": headers, "serializer": "json", "correlation_id": "c"}
    return LineMessage([[number], {}, {}], None, options, "base:{x}", "digest", 0, 30.0).text


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(name="x", shared=False)
    def work(number: int) -> None: ...

    app.finalize(auto=True)
    return app.tasks["x"]


@pytest.fixture
def queued(app: Celery, task: Any, queue: str) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that takes all messages out of the queue, and returns their ids."""
    with app.connection_for_write() as connection, connection.SimpleQueue(queue) as simple:
        yield lambda: [simple.get_nowait().headers["id"] for _ in range(simple.qsize())]


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    yield found
    found.close()


@pytest.fixture
def way(app: Celery, hub: Hub) -> Iterator[HandOver]:
    found = HandOver(app)
    yield found
    if HAND_OVER in app.__dict__:  # not closed by the test
        found.close(hub)


@pytest.fixture
def run(way: HandOver, app: Celery, hub: Hub, queue: str) -> Callable[[Callable[[Any], object]], None]:
    """Return a function that has an event loop receive one message, for a consumer that does this with it."""

    def run(on_message: Callable[[Any], object]) -> None:
        consumer = SimpleNamespace(on_message=on_message, accept={"application/json"}, consuming_from=queue.__eq__)
        way.listen(SimpleNamespace(app=app, task_consumer=consumer), hub)
        next(hub.loop)

    return run


def test_message_as_a_broker_delivers_it(
    task: Any, queue: str, run: Callable[..., None], queued: Callable[[], list[str]]
) -> None:
    """The consumer gets body, headers and properties; to acknowledge or reject it has no effect."""
    found: list[Any] = []
    publish_next(task.app, text_of(queue, 1))
    run(found.append)
    (message,) = found
    assert ([[1], {}, {}], "x", "id-1") == (message.payload, message.headers["task"], message.headers["id"])
    assert {"correlation_id": "c"} == message.properties
    assert (queue, False) == (message.delivery_info["routing_key"], message.delivery_info["redelivered"])
    message.ack_log_error(logging.getLogger(), ())
    message.reject_log_error(logging.getLogger(), (), requeue=True)
    assert [] == queued()


def test_error(
    task: Any, queue: str, run: Callable[..., None], queued: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged. The message may have begun, so it is not published: its copy starts it, if need be."""

    def fail(message: Any) -> None:
        raise LookupError(message.headers["id"])

    publish_next(task.app, text_of(queue, 1))
    run(fail)
    assert "could not start the next in line in its holder's worker" in caplog.text
    publish_next(task.app, text_of(queue, 2, task="y"))
    run(fail)
    assert ["id-2"] == until(queued, "the other one is published")


def test_task_of_another_worker(
    task: Any, queue: str, run: Callable[..., None], queued: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The message of a task that this worker does not have is published, as members of a lock group may be in others."""
    publish_next(task.app, text_of(queue, 1, task="y"))
    run(lambda message: pytest.fail("started"))
    until(lambda: ["id-1"] == queued(), "it is published")
    assert "" == caplog.text


def test_full(task: Any, queue: str, way: HandOver, queued: Callable[[], list[str]]) -> None:
    """A message that does not fit is published at once."""
    handed = 0
    while way.offer(text_of(queue, handed, MAX_MESSAGE // 2)):
        handed += 1
    assert handed
    publish_next(task.app, text_of(queue, handed))
    assert [f"id-{handed}"] == queued()


def test_close(task: Any, queue: str, way: HandOver, hub: Hub, queued: Callable[[], list[str]]) -> None:
    """What was not received when the worker stops is published; from then on, its processes publish themselves."""
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # also if the test fails
        os.read(read, 1)
        os._exit(int(way.offer(text_of(queue, 2))))
    publish_next(task.app, text_of(queue, 1))
    assert [] == queued()
    way.close(hub)
    until(lambda: ["id-1"] == queued(), "it is published")
    os.write(write, b"x")
    assert 0 == os.waitpid(child, 0)[1], "refused"
    publish_next(task.app, text_of(queue, 3))
    assert ["id-3"] == queued()


def test_queue_that_this_app_does_not_know(task: Any, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the publication is logged with the message's task id, and does not reach the task that has ended."""
    task.app.conf.task_create_missing_queues = False
    publish_next(task.app, LineMessage.of(text_of(queue, 1))._replace(queue="unknown").text)
    assert "Task x[id-1] could not be published in its turn" in caplog.text
