"""Messages whose turn has come, and that reach a worker without a free process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.worker import state as worker_state
from kombu import Connection

from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.line import returning
from celery_singleton_lock.line.returning import _DELIVERIES, KEPT, Returns
from tests.servers import RabbitMQServer, RedisServer, until

IN_TURN = RetryState(ticket="t", copy=1.5)


class Worker:
    """A worker with one process that receives one message."""

    def __init__(self, queue: Any, state: RetryState = IN_TURN, driver: str = "amqp", **headers: Any) -> None:
        self.started = 0
        self.looks: list[Callable[[], object]] = []
        self._queue, self._returns = queue, Returns()
        timer = SimpleNamespace(call_after=lambda seconds, call: self.looks.append(call))
        tasks = SimpleNamespace(channel=queue.channel, on_message=lambda message: self._start())
        self.consumer = SimpleNamespace(
            connection=SimpleNamespace(transport=SimpleNamespace(driver_type=driver)),
            pool=SimpleNamespace(num_processes=1),
            hub=object(),
            timer=timer,
            task_consumer=tasks,
            connection_errors=(),
        )
        queue.put({}, headers={"id": "i", "task": "x", RETRY_STATE_HEADER: state._asdict(), **headers})

    def receive(self, **changes: Any) -> None:
        """Take the message from the queue."""
        message = self._queue.get_nowait()
        for name, value in changes.items():
            setattr(message, name, value)
        self.take(message)

    def take(self, message: Any) -> None:
        """Do with the message what a worker does."""
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
    ("options", "changes"),
    [
        ({"state": RetryState()}, {}),
        ({}, {"channel": None}),
        ({_DELIVERIES: 1}, {}),
        ({"driver": "sql"}, {}),
    ],
    ids=["not of the line", "handed over", "returned before to a quorum queue", "a broker that puts it elsewhere"],
)
def test_message_that_is_not_returned(queue: Any, options: dict[str, Any], changes: dict[str, Any]) -> None:
    """Some messages cannot be returned, or must not be."""
    worker = Worker(queue, **options)
    worker.receive(**changes)
    assert 1 == worker.started


def test_pool_of_greenlets(queue: Any, busy: set[object]) -> None:
    """Before Celery 5.7, gevent's pool says how many greenlets run, and not how many may."""
    busy.clear()
    worker = Worker(queue)
    worker.consumer.pool = SimpleNamespace(is_green=True, limit=1, num_processes=0)
    worker.receive()
    assert 1 == worker.started


def test_broker_that_cannot_be_reached(queue: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A message that cannot be returned starts."""
    worker = Worker(queue, driver="redis")  # a channel of another kind, so that the call fails
    worker.receive()
    assert (1, False) == (worker.started, worker.is_queued)
    assert "could not be returned" in caplog.text


def test_free_process(queue: Any, busy: set[object]) -> None:
    """A message starts at once where a process is free."""
    busy.clear()
    worker = Worker(queue)
    worker.receive()
    assert (1, False) == (worker.started, worker.is_queued)


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_place_in_the_queue(request: pytest.FixtureRequest, kind: str) -> None:
    """A returned message is the next one, whatever else is in its queue."""
    fixture = {"redis": "redis_server", "amqp": "rabbitmq_server"}[kind]
    server: RedisServer | RabbitMQServer = request.getfixturevalue(fixture)
    with Connection(server.url()) as connection, connection.SimpleQueue("returned") as queue:
        worker = Worker(queue, driver=kind)
        for number in range(3):
            queue.put({}, headers={"number": number})
        worker.receive()
        received = [queue.get(timeout=10) for _ in range(4)]
        for message in received:
            message.ack()
        assert [True, False, False, False] == [bool(one.delivery_info.get("redelivered")) for one in received]
        assert [None, 0, 1, 2] == [one.headers.get("number") for one in received]


def test_worker_that_waits_for_messages(redis_server: RedisServer) -> None:
    """A returned message that another worker receives at that moment comes again if that one dies before it acknowledges."""

    def receive() -> str:
        with Connection(redis_server.url()) as connection, connection.SimpleQueue("returned") as queue:
            message = queue.get(timeout=10)
            time.sleep(0.02)  # what the other one does after it has returned it
            with redis.Redis.from_url(redis_server.url()) as client:
                is_kept = client.hexists("unacked", message.delivery_tag)
            message.ack()
            return "kept" if is_kept else "lost"

    with Connection(redis_server.url()) as connection, connection.SimpleQueue("returned") as queue:
        for _ in range(20):
            worker = Worker(queue, driver="redis")
            message = queue.get(timeout=10)
            with ThreadPoolExecutor(1) as threads:
                received = threads.submit(receive)
                with redis.Redis.from_url(redis_server.url()) as client:
                    until(lambda: client.info("clients")["blocked_clients"], "it waits")
                worker.take(message)
                assert "kept" == received.result()
