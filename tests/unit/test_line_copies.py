"""Delayed copies of messages that wait in line, when the task has changed meanwhile."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from kombu.asynchronous import Hub
from kombu.common import QoS

from celery_singleton_lock import RunOnceMore, Wait
from celery_singleton_lock.clock import now
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.delays import LONGEST_DELAY
from celery_singleton_lock.delivery.properties import PROPERTY, Delivery
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.line import copies as copies_module
from celery_singleton_lock.line.copies import STORE_RETRY, Copies, Copy, request_of
from celery_singleton_lock.line.dispatch import FIRST_RETRY
from celery_singleton_lock.store.protocol import GracePeriod
from celery_singleton_lock.store.requests import LeaseSpec, Place
from celery_singleton_lock.testing import locked
from tests.servers import free_port, until
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]
TICKET = RetryState(ticket="t", copy=1.0)


@pytest.fixture(autouse=True)
def _forget_results(app: Celery) -> None:
    """All apps of a process share the results in memory."""
    app.backend.client.cache.clear()


def from_copy(task: Any, *args: Any) -> Any:
    """Have a worker handle a copy that is due; return the message that it publishes, None if it publishes none."""
    copy, _ = kept(task, *args)
    with task.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        assert Copies(task.app).handle(copy) is None
        return queue.get_nowait() if queue.qsize() else None


def kept(task: Any, *args: Any, **state: Any) -> tuple[Copy, list[str]]:
    """Return a copy that a worker has received, and what has been done with it."""
    done: list[str] = []
    copy = {RETRY_STATE_HEADER: TICKET._replace(original_id="id-1", **state)._asdict()}
    with task.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        task.apply_async(task_id="copy", headers=copy)
        message = queue.get_nowait()
    message.ack_log_error = lambda *_: done.append("acknowledged")
    tasks = SimpleNamespace(channel=message.channel)  # of a living connection
    qos = QoS(lambda prefetch_count: done.append(f"limit {prefetch_count}"), 5)
    consumer = SimpleNamespace(qos=qos, connection_errors=(), task_consumer=tasks, call_soon=lambda call: call())
    request = request_of(message)
    request.args = args  # which need not fit
    return Copy(Attempt(task, request), message, consumer), done


@contextmanager
def broker_away(app: Celery) -> Iterator[None]:
    """Refuse to publish."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the broker is away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(app.amqp.__dict__, "send_task_message", refuse)
        yield


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
    """A message in line whose lock key cannot be made any more fails under its own task id."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    assert from_copy(task, "one too many") is None
    assert isinstance(app.AsyncResult("id-1").result, TypeError)


@pytest.fixture
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone of the machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles"], indirect=True)
@pytest.mark.parametrize("minutes", [-1, 10])
def test_expiry_without_a_zone(singleton: Singleton, minutes: int) -> None:
    """An expiry without a time zone is in UTC, as for Celery, whatever the zone here: a copy comes then, or after a TTL."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    expires = (datetime.now(timezone.utc) + timedelta(minutes=minutes)).replace(tzinfo=None).isoformat()
    with locked(task):
        messages(task)
        deliver(task, expires=expires)
        (copy,) = messages(task)
    left = (datetime.fromisoformat(copy.headers["eta"]) - datetime.now(timezone.utc)).total_seconds()
    assert (left < 1) if minutes < 0 else (25 < left < 31)


def test_copy_while_the_store_is_away(singleton: Singleton, app: Celery) -> None:
    """A copy that cannot reach the store stays in its worker, and is due again soon; its message keeps its place."""
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{free_port()}/0"

    @singleton(name="x", on_duplicate="wait", lock_ttl=20, on_store_error="raise")
    def task() -> None: ...

    copy, done = kept(task)
    copies = Copies(app)
    assert 5.0 == copies.handle(copy)
    assert 0 < (copies.handle(copy) or 0) <= STORE_RETRY  # the store is not asked again at once
    assert [] == done == messages(task)


def test_copy_of_a_message_that_goes_on_waiting(singleton: Singleton, app: Celery) -> None:
    """It stays in its worker for as long as the broker bears it; then the next one is published, with a higher number."""

    @singleton(name="x", on_duplicate="wait", lock_ttl=20)
    def task() -> None: ...

    copies = Copies(app)
    with locked(task):
        copy, done = kept(task)
        for _ in range(3):
            assert copies.handle(copy) == pytest.approx(20, abs=2)
        assert [] == done == messages(task)
        number, waited = copy.attempt.retry_state.copy, copy.attempt.retry_state.waited
        copy.received -= LONGEST_DELAY
        assert copies.handle(copy) is None
        (following,) = messages(task)
        assert ["limit 4", "acknowledged"] == done
    state = following.headers[RETRY_STATE_HEADER]
    assert ("id-1", True) == (state["original_id"], state["copy"] > number)
    assert state["waited"] == pytest.approx(waited + 20, abs=2)
    assert "copy" != following.headers["id"] != "id-1"


@pytest.mark.parametrize("fails", [True, False])
def test_copy_that_comes_again(singleton: Singleton, app: Celery, fails: bool) -> None:
    """A copy whose worker died still counts, also if it has joined the line again, or could not publish its message."""

    @singleton(name="x", on_duplicate="wait", lock_ttl=20)
    def task() -> None: ...

    copies = Copies(app)
    copy, done = kept(task)
    if fails:
        with broker_away(app):
            assert FIRST_RETRY == copies.handle(copy)
    with locked(task):
        for one in (copy, copy, kept(task)[0]):
            assert copies.handle(one) == pytest.approx(20, abs=2)
    assert [] == done


@pytest.mark.parametrize("goes_on", [True, False])
def test_copy_while_the_broker_is_away(singleton: Singleton, app: Celery, goes_on: bool) -> None:
    """A copy is acknowledged when what follows it is published, and not before; meanwhile nobody has its turn."""

    @singleton(name="x", on_duplicate="wait", lock_ttl=20)
    def task() -> None: ...

    copy, done = kept(task)
    copies, holding = Copies(app), locked(task) if goes_on else nullcontext()
    with holding:
        copy.received -= LONGEST_DELAY
        with broker_away(app):
            assert FIRST_RETRY == copies.handle(copy)
            assert goes_on or task.lock_holder() is None
        assert [] == done == messages(task)
        assert copies.handle(copy) is None
    assert ["limit 4", "acknowledged"] == done


def test_copy_that_may_not_stay_until_it_is_due(
    singleton: Singleton, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is published again when the broker would bear it no longer, and the store is not asked before it is due."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    monkeypatch.setattr(copies_module, "longest_delay", lambda conf: 1.0)
    due = time.time() + 80
    copy, done = kept(task, due=due)
    copies = Copies(app)
    copies.add(copy)
    until(lambda: done, "it is acknowledged")
    copies.end()
    (following,) = messages(task)
    state = following.headers[RETRY_STATE_HEADER]
    assert (pytest.approx(due, abs=2), True) == (state["due"], state["copy"] > TICKET.copy)
    assert 0.9 < now() - copy.received < 60


def test_expired_copy_while_another_message_with_its_id_runs(app: Celery, singleton: Singleton) -> None:
    """It is handled again, and stores nothing: that would be the state of the task that runs."""
    seen = []

    @singleton(name="x", on_duplicate="wait")
    def task() -> None:
        copy, done = kept(task, expires="2020-01-01T00:00:00", identity="other")
        seen.extend([Copies(app).handle(copy), done, app.backend.get_state("id-1")])

    deliver(task, properties={PROPERTY: tuple(Delivery(identity="this"))})
    assert [FIRST_RETRY, [], states.PENDING] == seen


@pytest.mark.parametrize(
    ("identity", "end"), [("other", "waits in line"), ("this", "another delivery of this task succeeded")]
)
def test_message_that_finds_its_id_in_a_cooldown(singleton: Singleton, identity: str, end: str) -> None:
    """One that came again while the other message with its id ran waits like any other; a redelivery of that one is dropped."""

    @singleton(name="x", on_duplicate="wait", lock_at_least=3600)
    def task() -> None: ...

    deliver(task, properties={PROPERTY: tuple(Delivery(identity="this"))})
    checked = RetryState(redelivery_checks=1, identity=identity)
    assert (end,) == deliver(task, headers={RETRY_STATE_HEADER: checked._asdict()}).info.retval.args


def test_expired_copy_while_the_broker_is_away(singleton: Singleton) -> None:
    """An expired message whose copy could not publish it is published by that copy later."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    copy, _ = kept(task, expires="2020-01-01T00:00:00")
    copies = Copies(task.app)
    with broker_away(task.app):
        assert FIRST_RETRY == copies.handle(copy)
    assert copies.handle(copy) is None
    (message,) = messages(task)
    assert ("id-1", "") == (message.headers["id"], message.headers[RETRY_STATE_HEADER]["ticket"])


def messages(task: Any) -> list[Any]:
    """Take all messages out of the queue."""
    with task.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        return [queue.get_nowait() for _ in range(queue.qsize())]


def test_publish_behind_the_line(singleton: Singleton, app: Celery) -> None:
    """A call with `lock_from="publish"` does not take a free lock for which messages wait: it is sent, and waits behind them."""

    @singleton(name="x", on_duplicate="wait", lock_from="publish")
    def task() -> None: ...

    config = config_for(task)
    with locked(task):
        place = Place("first", room=9, next_copy=1.0, due=60.0)
        spec = LeaseSpec(config.base, config.digest((), {}), "first", 60.0, "first", place=place)
        assert context_of(app).store.acquire(spec).is_waiting
    assert task.lock_holder() is None
    assert "first" == task.delay().duplicate.task_id
    assert task.lock_holder() is None


@pytest.mark.parametrize("retries", [0, 1])
def test_redelivery_of_a_replaced_task(singleton: Singleton, app: Celery, retries: int) -> None:
    """A redelivered message that was replaced while it ran does not run again, also if it was its own retry."""

    @singleton(name="x", on_duplicate="replace")
    def task() -> None:
        raise AssertionError("runs again")

    config, store = config_for(task), context_of(app).store
    digest = config.digest((), {})
    holder = LeaseSpec(config.base, digest, "holder", 60.0, "id-1")
    store.acquire(holder)
    place = Place("newcomer", room=1, replace=True, next_copy=1.0, due=60.0, stop=True)
    store.acquire(LeaseSpec(config.base, digest, "newcomer", 60.0, "newcomer", place=place))
    store.release(holder, success=False)
    deliver(task, retries=retries, delivery_info={"redelivered": True})
    assert "REVOKED" == app.AsyncResult("id-1").state


def test_limit_that_fails(singleton: Singleton, app: Celery) -> None:
    """A message in line whose `lock_limit` raises an error fails under its own task id."""

    def limit() -> int:
        raise KeyError("plan")

    @singleton(name="x", on_duplicate="wait", lock_limit=limit)
    def task() -> None: ...

    assert from_copy(task) is None
    assert isinstance(app.AsyncResult("id-1").result, KeyError)


def test_policy_that_changes_its_mind(singleton: Singleton, app: Celery) -> None:
    """A message that finds no room and then waits under another policy has one ticket, so that it does not run twice."""
    chosen: list[Any] = [Wait(), RunOnceMore()]

    def choose(task: Any, holder: Any) -> Any:
        if len(chosen) == 2:  # another one joins at this moment
            place = Place("other", room=1, next_copy=1.0, due=60.0)
            spec = LeaseSpec(config.base, config.digest((), {}), "other", 60.0, "other", place=place)
            assert context_of(app).store.acquire(spec).is_waiting
        return chosen.pop()

    @singleton(name="x", on_duplicate=choose)
    def task() -> None: ...

    config = config_for(task)
    with locked(task), app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        assert "IGNORED" == deliver(task).info.state
        copies = [queue.get_nowait().headers[RETRY_STATE_HEADER]["ticket"] for _ in range(queue.qsize())]
    assert (2, 1) == (len(copies), len(set(copies)))


@pytest.mark.parametrize("reaction", ["retry", "run", "raise"])
def test_store_away_after_a_long_wait(singleton: Singleton, app: Celery, reaction: str) -> None:
    """If the store is unreachable when a message's turn comes, the message is retried, however long it waited in line.

    It neither runs nor fails, as it may still be in line, and would be started once more.
    """
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{free_port()}/0"

    @singleton(name="x", on_duplicate=Wait(max_wait=math.inf), on_store_error=reaction)
    def task() -> None:
        raise AssertionError("runs without a lock")

    waited = TICKET._replace(waited=7200.0)._asdict()
    assert "RETRY" == deliver(task, headers={RETRY_STATE_HEADER: waited}).info.state


def test_copy_is_acknowledged_in_the_next_round_of_the_loop(singleton: Singleton) -> None:
    """In Kombu, what a callback of the loop asks it to call waits for the next event, up to a second: here for each copy."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    copy, done = kept(task)
    hub = Hub()
    reader, writer = socket.socketpair()
    hub.add_reader(reader, lambda: None)
    copy.consumer.call_soon = hub.call_soon
    loop = hub.create_loop()
    threading.Thread(target=Copies(task.app).acknowledge, args=(copy,)).start()
    until(lambda: hub._ready, "asked for")
    next(loop)
    assert ["limit 4", "acknowledged"] == done
    hub.close()
    reader.close()
    writer.close()


def test_copies_that_end_after_the_loop_has_looked_at_the_limit(singleton: Singleton) -> None:
    """The limit is lowered once, and before they are acknowledged, also beside the loop's own look at it: a pool may be busy."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    copy, done = kept(task)
    asked: list[Callable[[], object]] = []
    copy.consumer.call_soon = asked.append
    copies = Copies(task.app)
    for _ in range(3):
        copies.acknowledge(copy)
    copy.consumer.qos.update()  # as its loop does, before it calls what it is asked to
    before = list(done)
    for call in asked:
        call()
    assert (["limit 5"], ["limit 5", "limit 2", *["acknowledged"] * 3]) == (before, done)


def test_limit_that_cannot_be_lowered(singleton: Singleton) -> None:
    """The loop meets the error of a broken connection itself, and goes on with its other callbacks; nothing is acknowledged."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    def refuse(prefetch_count: int) -> None:
        raise ConnectionResetError

    copy, done = kept(task)
    copy.consumer.connection_errors = (ConnectionResetError,)
    copy.consumer.qos = QoS(refuse, 5)
    Copies(task.app).acknowledge(copy)
    assert [] == done
    assert copy.consumer.qos.value == 4


def test_copy_of_a_connection_that_is_lost(singleton: Singleton) -> None:
    """It lowers no limit of the connection after it, and is not acknowledged there."""

    @singleton(name="x", on_duplicate="wait")
    def task() -> None: ...

    copy, done = kept(task)
    copy.consumer.task_consumer = None
    Copies(task.app).acknowledge(copy)
    assert [] == done


def test_message_that_began_and_comes_too_late(singleton: Singleton, app: Celery) -> None:
    """A message whose body had begun, and that its copy has published, waits again if another body runs: it has no copy."""

    @singleton(name="x", on_duplicate="wait", acks_late=True)
    def task() -> None: ...

    messages(task)  # of other tests
    with locked(task):
        deliver(task)
        (copy,) = messages(task)
        state = {**copy.headers[RETRY_STATE_HEADER], "original_id": "", "is_unfinished": True}
        state["copy"] += 0.5
        deliver(task, headers={RETRY_STATE_HEADER: state})
        (following,) = messages(task)
    assert "id-1" == following.headers[RETRY_STATE_HEADER]["original_id"]


def test_grace_period_is_no_failed_call(app: Celery, singleton: Singleton, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that meets a grace period is kept, and nothing is counted: the store has answered."""

    @singleton(name="x", on_duplicate="wait", lock_ttl=20)
    def task() -> None: ...

    def acquire(*_: Any) -> None:
        raise GracePeriod(5.0)

    copies, context = Copies(app), context_of(app)
    monkeypatch.setattr(context.store, "acquire", acquire)
    copy, done = kept(task)
    assert (5.0, []) == (copies.handle(copy), done)
    assert {} == context.tally.take()
