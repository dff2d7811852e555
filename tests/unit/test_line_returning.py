"""Messages whose turn has come, and that reach a worker without a free process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state as worker_state
from kombu import Connection

from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.line import returning
from celery_singleton_lock.line.returning import _DELIVERIES, _MOST_DELIVERIES, KEPT, Returns
from tests.servers import RabbitMQServer, RedisServer

IN_TURN = RetryState(ticket="t", copy=1.5)


class Worker:
    """A worker with one process that receives one message."""

    def __init__(self, queue: Any, state: RetryState = IN_TURN, **headers: Any) -> None:
        self.started = 0
        self.looks: list[Callable[[], object]] = []
        self._queue, self._returns = queue, Returns()
        timer = SimpleNamespace(call_after=lambda seconds, call: self.looks.append(call))
        pool, tasks = SimpleNamespace(num_processes=1), SimpleNamespace(channel=queue.channel)
        self.consumer = SimpleNamespace(pool=pool, hub=object(), timer=timer, task_consumer=tasks, connection_errors=())
        queue.put({}, headers={"id": "i", "task": "x", RETRY_STATE_HEADER: state._asdict(), **headers})

    def receive(self, **changes: Any) -> None:
        """Take the message from the queue."""
        message = self._queue.get_nowait()
        for name, value in changes.items():
            setattr(message, name, value)
        self._returns.take(message, message.headers[RETRY_STATE_HEADER], self.consumer, self._start)

    def _start(self) -> None:
        self.started += 1

    @property
    def is_queued(self) -> bool:
        """Whether the message is at the broker."""
        return bool(self._queue.qsize())


@pytest.fixture
def queue(app: Celery) -> Iterator[Any]:
    with app.connection_for_write() as connection, connection.SimpleQueue("returned") as simple:
        simple.clear()
        yield simple


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """What the process of the worker has to do."""
    requests: set[object] = {"a body"}
    monkeypatch.setattr(worker_state, "reserved_requests", requests)
    return requests


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time."""
    clock = SimpleNamespace(time=0.0)
    monkeypatch.setattr(returning, "now", lambda: clock.time)
    return clock


def test_worker_without_a_free_process(queue: Any, at: SimpleNamespace) -> None:
    """It returns the message, at once and then after a moment, a few times, and keeps it after that."""
    worker = Worker(queue)
    for kept in KEPT:
        worker.receive()
        if kept:
            at.time += kept - 0.001
            worker.looks.pop()()
            assert not worker.is_queued
            at.time += 0.002
            worker.looks.pop()()
        assert (0, True, []) == (worker.started, worker.is_queued, worker.looks)
    worker.receive()
    assert (1, False, []) == (worker.started, worker.is_queued, worker.looks)


def kept(queue: Any) -> Worker:
    """Return a worker that has the message for a moment."""
    worker = Worker(queue)
    worker.receive()
    worker.receive()
    return worker


def test_process_that_becomes_free(queue: Any, busy: set[object]) -> None:
    """A message that is kept for a moment starts once a process is free."""
    worker = kept(queue)
    busy.clear()
    worker.looks.pop()()
    assert (1, False) == (worker.started, worker.is_queued)


@pytest.mark.parametrize("tasks", [None, SimpleNamespace(channel="another")], ids=["away", "back"])
def test_connection_that_is_lost(queue: Any, busy: set[object], tasks: Any) -> None:
    """The broker delivers a message again that was kept for a moment, so it does not start, too."""
    worker = kept(queue)
    worker.consumer.task_consumer = tasks
    busy.clear()
    worker.looks.pop()()
    assert (0, []) == (worker.started, worker.looks)


def test_worker_without_an_event_loop(queue: Any) -> None:
    """It returns a message once: its timers have a thread of their own."""
    worker = Worker(queue)
    worker.consumer.hub = None
    worker.receive()
    assert (0, True) == (worker.started, worker.is_queued)
    worker.receive()
    assert (1, False) == (worker.started, worker.is_queued)


@pytest.mark.parametrize(
    ("state", "headers", "changes"),
    [
        (RetryState(), {}, {}),
        (IN_TURN, {}, {"channel": None}),
        (IN_TURN, {_DELIVERIES: _MOST_DELIVERIES}, {}),
    ],
    ids=["not of the line", "handed over", "delivered often to a quorum queue"],
)
def test_message_that_is_not_returned(
    queue: Any, state: RetryState, headers: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Some messages cannot be returned, or must not be."""
    worker = Worker(queue, state, **headers)
    worker.receive(**changes)
    assert 1 == worker.started


def test_free_process(queue: Any, busy: set[object]) -> None:
    """A message starts at once where a process is free."""
    busy.clear()
    worker = Worker(queue)
    worker.receive()
    assert (1, False) == (worker.started, worker.is_queued)


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_place_in_the_queue(request: pytest.FixtureRequest, kind: str) -> None:
    """A returned message is the next one, whatever else is in its queue."""
    server: RedisServer | RabbitMQServer = request.getfixturevalue(f"{kind}_server")
    with Connection(server.url()) as connection, connection.SimpleQueue("returned") as queue:
        worker = Worker(queue)
        for number in range(3):
            queue.put({}, headers={"number": number})
        worker.receive()
        received = [queue.get(timeout=10) for _ in range(4)]
        for message in received:
            message.ack()
        assert [True, False, False, False] == [bool(one.delivery_info.get("redelivered")) for one in received]
        assert [None, 0, 1, 2] == [one.headers.get("number") for one in received]
