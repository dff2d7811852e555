"""Messages whose turn has come, and that reach a worker without a free process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state as worker_state

from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.line.returning import _DELIVERIES, _MOST_DELIVERIES, KEPT, Returns

IN_TURN = RetryState(ticket="t", copy=1.5)


class Worker:
    """A worker with one process, and the only message of its queue."""

    def __init__(self, queue: Any, state: RetryState = IN_TURN, **headers: Any) -> None:
        self.started = 0
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self._queue, self._returns = queue, Returns()
        timer = SimpleNamespace(call_after=lambda seconds, call: self.timers.append((seconds, call)))
        pool, tasks = SimpleNamespace(num_processes=1), SimpleNamespace(channel=queue.channel)
        self.consumer = SimpleNamespace(pool=pool, hub=object(), timer=timer, task_consumer=tasks, connection_errors=())
        queue.clear()
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
        yield simple


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """What the process of the worker has to do."""
    requests: set[object] = {"a body"}
    monkeypatch.setattr(worker_state, "reserved_requests", requests)
    return requests


def test_worker_without_a_free_process(queue: Any) -> None:
    """It returns the message, at once and then after a moment, a few times, and keeps it after that."""
    worker = Worker(queue)
    for kept in KEPT:
        worker.receive()
        if kept:
            assert not worker.is_queued
            ((seconds, call),) = worker.timers
            assert kept == seconds
            call()
            worker.timers.clear()
        assert (0, True) == (worker.started, worker.is_queued)
    worker.receive()
    assert (1, False, []) == (worker.started, worker.is_queued, worker.timers)


def kept(queue: Any) -> Worker:
    """Return a worker that has the message for a moment."""
    worker = Worker(queue)
    worker.receive()
    worker.receive()
    return worker


def test_process_that_becomes_free(queue: Any, busy: set[object]) -> None:
    """A message that is kept for a moment starts if a process is free then."""
    worker = kept(queue)
    busy.clear()
    worker.timers[0][1]()
    assert (1, False) == (worker.started, worker.is_queued)


@pytest.mark.parametrize("tasks", [None, SimpleNamespace(channel="another")], ids=["away", "back"])
def test_connection_that_is_lost(queue: Any, tasks: Any) -> None:
    """The broker delivers a message again that was kept for a moment, so it neither starts nor returns."""
    worker = kept(queue)
    worker.consumer.task_consumer = tasks
    worker.timers[0][1]()
    assert (0, False) == (worker.started, worker.is_queued)


def test_worker_without_an_event_loop(queue: Any) -> None:
    """Its timers have a thread of their own, which leaves the message to the consumer's."""
    worker, asked = Worker(queue), []
    worker.consumer.hub, worker.consumer.call_soon = None, asked.append
    worker.receive()
    worker.receive()
    worker.timers[0][1]()
    assert not worker.is_queued
    asked[0]()
    assert worker.is_queued


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
    assert (1, False) == (worker.started, worker.is_queued)


def test_free_process(queue: Any, busy: set[object]) -> None:
    """A message starts at once where a process is free."""
    busy.clear()
    worker = Worker(queue)
    worker.receive()
    assert (1, False) == (worker.started, worker.is_queued)
