"""How a worker's main process names deliveries."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Mapping
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.app.task import Context
from celery.concurrency import get_implementation
from celery.concurrency.prefork import TaskPool
from celery.worker import state
from kombu.message import Message

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.context import ProcessContext, context_of, replace_context
from celery_singleton_lock.delivery.properties import Delivery, delivery_of, take_delivery
from celery_singleton_lock.testing import memory_store
from celery_singleton_lock.worker import request as worker
from celery_singleton_lock.worker.bootstep import SingletonStep
from celery_singleton_lock.worker.control import tasks_with_locks
from tests.servers import until


@pytest.fixture
def app() -> Celery:
    """An app of which a worker is made here."""
    app = Celery(broker="memory://", set_as_current=False, changes={"singleton_lock_url": "redis://127.0.0.1:1/0"})

    @app.task(base=SingletonTask, name="x", shared=False)
    def task() -> None: ...

    start(app)
    return app


def start(app: Celery) -> None:
    """What a worker's main process does before it forks, and then for each task."""
    SingletonStep(SimpleNamespace(app=app, pool_cls=TaskPool))
    task = app.tasks["x"]
    task.Request = worker.request_class(task.Request, app, SimpleNamespace(pool=TaskPool.__new__(TaskPool)))


def received(app: Celery) -> Any:
    """The request for a message."""
    task, body = app.tasks["x"], [[], {}, {}]
    message = Message(headers={"id": "1", "task": "x"}, body=body, content_type="application/json", properties={"a": 1})
    return task.Request(message, app=app, task=task, body=body, decoded=True, hostname="h")


def in_a_fork(look: Callable[[], str]) -> str:
    """What a child sees."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, look().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        os.waitpid(pid, 0)
        return answer.read()


def sent(request: Any) -> Delivery:
    """What a child makes of what it is sent."""
    return delivery_of(Context(pickle.loads(pickle.dumps(request.request_dict))))


def test_children_are_sent_the_token(app: Celery) -> None:
    """Child and main process know the same token of a delivery, each delivery has its own, and none is shown."""
    first, second = received(app), received(app)
    for request in (first, second):
        found, token = sent(request), request._lease_request(1).token
        assert Delivery(token, "application/json", False, True) == found
        assert re.fullmatch("[0-9a-f]{32}", token)
        assert token not in repr(request.request_dict)
        assert 1 == request.request_dict["properties"]["a"]
        assert {"a": 1} == request.message.properties
    assert first._lease_request(1).token != second._lease_request(1).token


@pytest.mark.parametrize("properties", [None, {}, Mock(), "text", 5])
def test_properties_that_are_no_mapping(app: Celery, properties: Any) -> None:
    """A message may have any properties, such as the Mock of a test of requests: its delivery has a token all the same."""
    task, body = app.tasks["x"], [[], {}, {}]
    message = Mock(headers={"id": "1", "task": "x"}, body=body, content_type="application/json", properties=properties)
    if not hasattr(properties, "get"):  # Celery's own request reads some of them
        message.properties = None
    request = task.Request(message, app=app, task=task, body=body, decoded=True, hostname="h")
    assert request._lease_request(1).token == delivery_of(Context(request.request_dict)).token
    context = Context({**request.request_dict, "properties": properties})
    assert Delivery() == delivery_of(context)
    assert 32 == len(take_delivery(context).token)
    assert Delivery() == delivery_of(context)


@pytest.mark.parametrize("pool", ["prefork", "processes", "solo", "threads", "gevent", "eventlet"])
def test_memory_store(app: Celery, pool: str) -> None:
    """A store in memory is refused with a clear message where bodies run in several processes."""
    app.conf.singleton_lock_url = "memory://"
    parent = SimpleNamespace(app=app, pool_cls=get_implementation(pool))
    replace_context(app, None)
    if pool in ("prefork", "processes"):
        with pytest.raises(ConfigurationError, match=r"singleton_lock_url='memory://'.*prefork"):
            SingletonStep(parent)
    else:
        SingletonStep(parent).start(parent)


def test_worker_that_was_forked_from_another(app: Celery) -> None:
    """It has a supervisor of its own."""

    def another() -> str:
        start(app)
        return str(app.tasks["x"].Request.supervisor is context_of(app).supervisor)

    assert "True" == in_a_fork(another)


def test_another_start_in_the_same_process(app: Celery) -> None:
    """As after a lost connection to the broker, or beside another app's worker: what children know stays true."""
    before, kept = app.tasks["x"].Request, received(app)
    token = sent(kept).token
    start(app)
    assert before is app.tasks["x"].Request
    assert token == sent(kept).token


def test_task_whose_runtime_is_another(app: Celery) -> None:
    """The token does not depend on the app or the store of the process that runs the body."""
    request = received(app)
    token = request._lease_request(1).token
    with memory_store(app):
        assert token == sent(request).token == request._lease_request(1).token


def test_tasks_with_locks(app: Celery) -> None:
    """A worker names a task from its reception to its end: before a child has begun it, and also if its key cannot be made."""
    own, other = received(app), received(app)
    other.id, other._args = "2", ["an argument that the task does not take"]
    for request in (own, other):
        state.task_reserved(request)
    try:
        known = {"task": "x", "pid": None, "held": None}
        expected = [
            {**known, "task_id": "1", "key": app.tasks["x"].lock_key_for()},
            {**known, "task_id": "2", "key": ""},
        ]
        assert expected == sorted(tasks_with_locks(app), key=itemgetter("task_id"))
        own.worker_pid = 4711
        assert 4711 in [found["pid"] for found in tasks_with_locks(app)]
    finally:
        for request in (own, other):
            state.task_ready(request)
    assert [] == tasks_with_locks(app)


def test_death_of_a_child(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """The log of a child's death has the fields of all others; its key is that of the slot, once a renewal has told it."""
    caplog.set_level("INFO", "celery_singleton_lock")
    request = received(app)
    request.log_death(4711)
    request.child_lease = request._lease_request(4711)
    request.child_lease.lock = "of a slot"
    request.log_death(4711)
    text = "Task x[1] has died with pool process 4711, its lock is released; key "
    assert all(one.message.startswith(text) for one in caplog.records)
    found: list[Any] = [(one.task, one.task_id, one.key, one.holder) for one in caplog.records]  # type: ignore[attr-defined]
    assert [("x", "1", key, None) for key in (app.tasks["x"].lock_key_for(), "of a slot")] == found


class Connections:
    """A store that notes which threads use its connections."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.clones: list[Connections] = []
        self.added = False

    def clone(self) -> Connections:
        self.clones.append(Connections())
        return self.clones[-1]

    def records(self) -> Connections:
        return self

    def close(self) -> None: ...

    def add_tasks(self, key: str, tasks: Mapping[str, str]) -> None:
        self._use()
        self.added = True

    def _use(self, *args: Any) -> str:
        self.threads.add(threading.get_ident())
        return "noeviction"

    check = eviction_policy = _use


def test_names_of_tasks(app: Celery) -> None:
    """The thread that adds the names of tasks has connections of its own: greenlets cannot share one with a thread."""
    parent = SimpleNamespace(app=app, pool_cls=get_implementation("threads"))
    store = Connections()
    replace_context(app, ProcessContext(context_of(app).settings, store=store))  # type: ignore[arg-type]
    SingletonStep(parent).start(parent)
    until(lambda: any(clone.added for clone in store.clones), "the names are added")
    assert all(len(one.threads) <= 1 for one in (store, *store.clones))
    assert {threading.get_ident()} == store.threads
