"""Faults around a body: lost answers, late grants, lost leases, signals, forks and an unreachable broker."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any

import pytest
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.signals import task_postrun
from kombu.exceptions import EncodeError, OperationalError

from celery_singleton_lock import (
    ConfigurationError,
    DuplicateTask,
    Lease,
    LockLost,
    RetryLater,
    SingletonTask,
    StoreError,
    StoreUnavailable,
    log,
    signals,
)
from celery_singleton_lock import lease as lease_module
from celery_singleton_lock.clock import now
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import ProcessContext, replace_context
from celery_singleton_lock.delivery.properties import Delivery, new_token
from celery_singleton_lock.delivery.retry_state import RetryState
from celery_singleton_lock.renewal import loop as loop_module
from celery_singleton_lock.renewal import pending as pending_module
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireStatus, RenewResult
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.testing import assert_free, assert_held, locked
from celery_singleton_lock.worker import execution
from tests.servers import RedisServer, free_port
from tests.unit.conftest import MakeApp
from tests.unit.fake_store import FakeStore
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]


class MovableClock:
    """The monotonic clock, which a test can advance."""

    def __init__(self) -> None:
        self.by = 0.0

    def __call__(self) -> float:
        return now() + self.by

    def advance(self, seconds: float) -> None:
        self.by += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovableClock:
    clock = MovableClock()
    monkeypatch.setattr(execution, "now", clock)
    monkeypatch.setattr(lease_module, "now", clock)
    monkeypatch.setattr(pending_module, "now", clock)
    return clock


@pytest.fixture
def store(app: Any, clock: MovableClock) -> Iterator[FakeStore]:
    """Yield the store of `app`. Its renewal thread does not start: tests call `renew_due` themselves."""
    store = FakeStore(clock)
    context = ProcessContext(settings_of(app.conf), store=store)
    context.body_renewal = BodyRenewal(store, store, context.events, clock)
    context.renewer = Renewer(store, context.body_renewal, context.events.loop_failed, clock)
    context.renewer._loop.wake = lambda at: None  # type: ignore[method-assign]
    replace_context(app, context)
    yield store
    reported = threading.Event()  # the next test must not see callbacks of this one
    context.callbacks.call(reported.set)
    assert reported.wait(60)


def raising(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def renew_due(task: Any) -> float:
    """Do the due work of the renewal thread, which does it at once in a worker."""
    return execution.context_of(task.app).renewer.renew_due()


def request_of_another(task: Any, *args: Any) -> LeaseSpec:
    """Return another task's lease request for the same call."""
    plan = config_for(task)
    return LeaseSpec(plan.base, plan.digest(args, {}), "token-of-another", 600.0, "other")


def lose_to_another(task: Any, lease: Lease) -> None:
    """Revoke the lock of a lease, let another task acquire it, and let the renewer find the loss."""
    context, state = execution.context_of(task.app), lease._state
    task.force_unlock()
    assert context.store.acquire(request_of_another(task)).status is AcquireStatus.GRANTED
    assert state is not None
    assert not context.body_renewal.verify(state)
    assert state.lost


@contextmanager
def recorded(*watched: Any) -> Iterator[list[str]]:
    """Yield the names of these signals as they are sent."""
    seen: list[str] = []
    names = {id(signal): name for name, signal in vars(signals).items() if signal in watched}

    def note(signal: Any, **_: Any) -> None:
        seen.append(names[id(signal)])

    for signal in watched:
        signal.connect(note, weak=False)
    try:
        yield seen
    finally:
        for signal in watched:
            signal.disconnect(note)


# -- a grant whose answer was lost -------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "state"), [("run", None), ("raise", "FAILURE"), ("retry", "FAILURE")], ids=["run", "raise", "retry"]
)
def test_unanswered_grant_is_released(singleton: Singleton, store: FakeStore, option: str, state: Any) -> None:
    """A grant whose answer was lost is released after the delivery, whatever ``on_store_error`` says."""
    protected: list[bool] = []

    @singleton(name="x", bind=True, on_store_error=option)
    def task(self: Any) -> None:
        protected.append(self.lease.protected)

    store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
    result = task.apply()  # an eager run cannot be retried later
    assert (state or "SUCCESS") == result.state
    if state:
        assert isinstance(result.result, StoreUnavailable)
    assert ([] if state else [False]) == protected
    renew_due(task)
    assert store.acquired == store.released
    assert_free(task)


def test_unanswered_grant_is_released_before_the_next_attempt(singleton: Singleton, store: FakeStore) -> None:
    """A task that is published again after a lost answer does not become a duplicate of itself."""

    @singleton(name="x", on_store_error="retry")
    def task() -> str:
        return "ran"

    store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
    assert "RETRY" == deliver(task).info.state
    renew_due(task)
    assert_free(task)
    assert "ran" == deliver(task).retval


def test_lasting_outage_changes_no_outcome(singleton: Singleton, store: FakeStore) -> None:
    """An unanswered grant that cannot be released does not change the outcome; the renewal thread releases it later."""

    @singleton(name="x", on_store_error="run")
    def task() -> str:
        store.failure = StoreUnavailable("unreachable")
        return "ran"

    store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
    assert "ran" == deliver(task).retval
    assert assert_held(task).task_id == "id-1"
    store.failure = None
    renew_due(task)
    assert_free(task)


def test_grant_executed_after_its_release_is_released(
    singleton: Singleton, store: FakeStore, clock: MovableClock
) -> None:
    """A store that executes an acquire after its release leaves no lock."""

    @singleton(name="x", on_store_error="retry")
    def task() -> None: ...

    store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
    deliver(task)
    renewer = execution.context_of(task.app).renewer
    (request,) = (pending.spec for pending in renewer._pending._pending.values())
    renewer.renew_due()
    assert store.acquire(request).status is AcquireStatus.GRANTED
    clock.advance(request.ttl / 12)
    renewer.renew_due()
    assert_free(task)


def test_duplicate_releases_nothing(singleton: Singleton, store: FakeStore) -> None:
    """A duplicate calls the store once and releases nothing."""

    @singleton(name="x")
    def task() -> None: ...

    with locked(task):
        assert "IGNORED" == deliver(task).info.state
        assert [] == store.released


# -- a release that the store did not confirm ---------------------------------------------------


@pytest.mark.parametrize("executed", [False, True], ids=["not executed", "executed without an answer"])
def test_failed_release_is_repeated(
    singleton: Singleton, store: FakeStore, clock: MovableClock, executed: bool
) -> None:
    """A failed release is repeated when the store is reachable, not a TTL later; another holder's lock stays."""

    @singleton(name="x", lock_ttl=30)
    def task() -> None:
        store.failure = StoreUnavailable("unreachable")

    deliver(task)
    renewer = execution.context_of(task.app).renewer
    renewer.renew_due()
    assert "id-1" == assert_held(task).task_id
    store.failure = None
    if executed:
        task.force_unlock()
        assert store.acquire(request_of_another(task)).status is AcquireStatus.GRANTED
    clock.advance(3)
    renewer.renew_due()
    if executed:
        assert "other" == assert_held(task).task_id
    else:
        assert_free(task)


@pytest.mark.parametrize("success", [True, False], ids=["success", "failure"])
@pytest.mark.parametrize("executed", [False, True], ids=["not executed", "executed without an answer"])
def test_waiting_redelivery_learns_the_outcome_later(
    singleton: Singleton, store: FakeStore, executed: bool, success: bool
) -> None:
    """A redelivery is dropped after a success and runs after a failure, also when the release was not confirmed."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        assert store.acquire(redelivery).status is AcquireStatus.REFUSED  # from now on it waits

        def release() -> None:
            if executed:
                MemoryStore.release(store, self.lease._state.spec, success)
            raise StoreUnavailable("no answer")

        requests.append(self.lease._state.spec)
        store.on_release = [release]
        if not success:
            raise ValueError("failed")

    requests: list[LeaseSpec] = []
    redelivery = LeaseSpec(
        config_for(task).base, config_for(task).digest((), {}), "redelivery", 600.0, "id-1", redelivered=True
    )
    deliver(task)
    renew_due(task)
    assert (AcquireStatus.COMPLETED if success else AcquireStatus.GRANTED) is store.acquire(redelivery).status


def test_waiting_redelivery_learns_a_success_reported_late(singleton: Singleton, store: FakeStore) -> None:
    """A store that is unreachable when the result is stored records the success as soon as it is reachable."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        assert store.acquire(redelivery).status is AcquireStatus.REFUSED  # from now on it waits
        store.on_outcome = [raising(StoreUnavailable("unreachable"))]

    redelivery = LeaseSpec(
        config_for(task).base, config_for(task).digest((), {}), "redelivery", 600.0, "id-1", redelivered=True
    )
    deliver(task)
    assert store.acquire(redelivery).status is AcquireStatus.REFUSED
    renew_due(task)
    assert store.acquire(redelivery).status is AcquireStatus.COMPLETED


def test_redelivery_waits_while_the_result_is_stored(
    singleton: Singleton, store: FakeStore, clock: MovableClock
) -> None:
    """A redelivery waits for the hooks after a success, however long they take.

    Then it is dropped, and nothing is renewed.
    """

    class Slow(SingletonTask):
        def on_success(self, *_: Any, **__: Any) -> None:
            for _ in range(4):
                clock.advance(20)
                renew_due(task)
                answers.append(store.acquire(redelivery).status)  # the tracer would swallow an error here

    @singleton(name="x", base=Slow, lock_ttl=30)
    def task() -> None:
        assert store.acquire(redelivery).status is AcquireStatus.REFUSED  # from now on it waits

    answers: list[AcquireStatus] = []
    redelivery = LeaseSpec(
        config_for(task).base, config_for(task).digest((), {}), "redelivery", 600.0, "id-1", redelivered=True
    )
    assert deliver(task).info is None
    assert [AcquireStatus.REFUSED] * 4 == answers
    assert store.acquire(redelivery).status is AcquireStatus.COMPLETED
    for _ in range(2):
        clock.advance(3)
        due = renew_due(task)
    assert math.inf == due


def test_reacquired_lease_is_released_again(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A store that executes the call to reacquire a lease after its release leaves no lock."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> None:
        task.force_unlock()
        store.lose()
        clock.advance(10)
        store.on_answer = [raising(StoreUnavailable("stopped"))]
        renew_due(task)
        store.lose()  # the store has not executed that call yet
        requests.append(self.lease._state.spec)

    requests: list[LeaseSpec] = []
    deliver(task)
    assert_free(task)
    assert store.reacquire(requests[0], 0) == (RenewResult.RENEWED, True)
    renewer = execution.context_of(task.app).renewer
    for _ in range(2):
        renewer.renew_due()
        clock.advance(3)
    assert_free(task)


def test_reacquired_lease_that_another_holds_is_released_again(
    singleton: Singleton, store: FakeStore, clock: MovableClock
) -> None:
    """A store that executes it after another run acquired and released the lock leaves no lock either."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> None:
        store.lose()
        clock.advance(10)
        store.on_answer = [raising(StoreUnavailable("stopped"))]
        renewer.renew_due()
        store.lose()  # the store has not executed that call yet
        store.acquire(request_of_another(task))
        clock.advance(3)
        renewer.renew_due()
        assert not self.lease.held
        requests.append(self.lease._state.spec)

    requests: list[LeaseSpec] = []
    renewer = execution.context_of(task.app).renewer
    deliver(task)
    assert "other" == assert_held(task).task_id
    task.force_unlock()
    assert store.reacquire(requests[0], 0) == (RenewResult.LOST, True)
    for _ in range(2):
        renewer.renew_due()
        clock.advance(3)
    assert_free(task)


@pytest.mark.parametrize("done", [False, True], ids=["during the release", "after the release"])
def test_lease_leaves_the_renewer_before_its_release(
    singleton: Singleton, store: FakeStore, clock: MovableClock, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """The renewal thread neither renews nor reacquires a lease during its release, even if a renewal is due."""
    calls: list[str] = []

    def record(
        verb: str, then: Callable[[], object] = lambda: None, first: Callable[[], object] = lambda: None
    ) -> None:
        call = getattr(store, verb)

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            calls.append(verb)
            first()
            answer = call(*args, **kwargs)
            then()
            return answer

        monkeypatch.setattr(store, verb, recorded_call)

    def sweep() -> None:  # the sweep in the body shows that a sweep renews
        clock.advance(15)  # past a third of the TTL, and not past the deadline
        renew_due(task)

    @singleton(name="x", lock_ttl=30)
    def task() -> None:
        sweep()

    record("acquire")
    record("renew")
    record("release", **{"then" if done else "first": sweep})
    deliver(task)
    assert ["acquire", "renew", "release"] == calls
    assert_free(task)


# -- another delivery of the same message --------------------------------------------------------


def check_redelivery(task: Any, state: dict[str, Any], delay: float) -> dict[str, Any]:
    """Deliver a message whose task id holds the lock; return the retry state of the message that is published with this delay."""
    app = task.app
    runtime = execution.context_of(app)
    request = LeaseSpec(config_for(task).base, config_for(task).digest((), {}), "first-delivery", 600.0, "id-1")
    assert runtime.store.acquire(request).status is AcquireStatus.GRANTED
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        before = datetime.now(timezone.utc)
        assert "IGNORED" == deliver(task, headers={"singleton_retry_state": state}).info.state
        after = datetime.now(timezone.utc)
        headers = queue.get(timeout=5).headers
    assert before <= datetime.fromisoformat(headers["eta"]) - timedelta(seconds=delay) <= after
    return headers["singleton_retry_state"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["skip", "raise", "retry", RetryLater(delay=2, max_wait=1)])
def test_first_redelivery_check_comes_soon(singleton: Singleton, store: FakeStore, policy: Any) -> None:
    """The first redelivery check comes after 0.2 s, however often the message was published again as a duplicate."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    header = check_redelivery(task, {"times": 7, "waited": 90.0}, 0.2)
    assert RetryState(7, 90.0, 1)._asdict() == header


@pytest.mark.parametrize(("checks", "delay"), [(1, 0.4), (3, 1.6), (20, 2.0), (2000, 2.0)])
def test_redelivery_checks_back_off_to_the_policys_delay(
    singleton: Singleton, store: FakeStore, checks: int, delay: float
) -> None:
    """The delay between redelivery checks doubles up to the policy's delay, and does not count for max_wait."""

    @singleton(name="x", on_duplicate=RetryLater(delay=2, max_wait=1))
    def task() -> None: ...

    header = check_redelivery(task, {"times": 1, "waited": 0.5, "redelivery_checks": checks}, delay)
    assert RetryState(1, 0.5, checks + 1)._asdict() == header


def test_redelivery_checks_restart_after_a_wait_for_other_work(singleton: Singleton, store: FakeStore) -> None:
    """After a message was published again as a duplicate of other work, its next redelivery check counts as the first."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    with locked(task):
        outcome = deliver(task, headers={"singleton_retry_state": {"times": 1, "waited": 5.0, "redelivery_checks": 4}})
    (header,) = (outcome.info.retval.sig.options["headers"]["singleton_retry_state"],)
    assert (2, 0) == (header["times"], header["redelivery_checks"])


def test_own_retry_does_not_carry_the_retry_state(singleton: Singleton, store: FakeStore, app: Any) -> None:
    """The message of a task's own retry has the caller's headers, but not our retry state: its waiting starts anew."""
    seen: list[Any] = []

    @singleton(name="x", bind=True, max_retries=1, default_retry_delay=0)
    def task(self: Any) -> None:
        seen.append(self.request.headers)
        self.retry()

    headers = {"singleton_retry_state": {"times": 3, "waited": 90.0, "redelivery_checks": 2}, "x-mine": "of the caller"}
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        assert "RETRY" == deliver(task, headers=headers).info.state
        published = queue.get(timeout=5).headers
    assert [{"x-mine": "of the caller"}] == seen
    assert (1, "of the caller") == (published["retries"], published["x-mine"])
    assert "singleton_retry_state" not in published


def test_retry_by_a_receiver_of_the_end(singleton: Singleton, store: FakeStore, app: Any) -> None:
    """A receiver of `task_postrun` may retry the task, as one that is connected after the library's own."""

    @singleton(name="x", bind=True, default_retry_delay=0)
    def task(self: Any) -> None: ...

    def again(sender: Any, **_: Any) -> None:
        sender.retry(throw=False)

    task_postrun.connect(again, sender=task)
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        deliver(task)
        assert 1 == queue.get(timeout=5).headers["retries"]


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}], ids=["own", "auto"])
def test_token_is_not_published_with_a_retry(singleton: Singleton, store: FakeStore, app: Any, options: Any) -> None:
    """The message of a retry, the task's own or an automatic one, has neither the token nor our property."""

    @singleton(name="x", bind=True, default_retry_delay=0, **options)
    def task(self: Any) -> None:
        if options:
            raise ValueError
        self.retry()

    token = new_token()
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        headers = {"x-mine": "of the caller"}
        outcome = deliver(task, properties={"singleton": (token,)}, headers=headers)
        assert "RETRY" == outcome.info.state
        message = queue.get(timeout=5)
    assert [token] == store.released
    assert "of the caller" == message.headers["x-mine"]
    assert "singleton" not in message.properties
    assert token not in f"{message.headers} {message.properties} {message.body}"


# -- log lines -----------------------------------------------------------------------------------


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the library's lines about tasks: a thread of an earlier test may still write that its store is back."""
    own = [record.getMessage() for record in caplog.records if record.name == "celery_singleton_lock"]
    return [line for line in own if line.startswith("Task ")]


def test_refused_acquire_is_logged(singleton: Singleton, store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """A refused acquire raises under any setting, and one WARNING names the error, the key and the task id."""

    @singleton(name="x", on_store_error="run")
    def task() -> None:
        pytest.fail("must not run")

    store.on_answer = [raising(StoreError("NOPERM"))]
    with recorded(signals.store_error) as seen:
        assert isinstance(deliver(task).info.retval, StoreError)
    (line,) = own_lines(caplog)
    assert f"Task x[id-1] could not acquire its lock: NOPERM; key {task.lock_key_for()}" == line
    assert ["store_error"] == seen
    renew_due(task)
    assert [] == store.released, "a store that refuses has granted nothing"


def test_dropped_redelivery_is_logged(singleton: Singleton, store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """The log line of a dropped redelivery names its task id and the key."""

    @singleton(name="x")
    def task() -> None:
        pytest.fail("must not run")

    caplog.set_level("INFO", "celery_singleton_lock")
    request = LeaseSpec(config_for(task).base, config_for(task).digest((), {}), "first-delivery", 600.0, "id-1")
    store.record_outcome(request, success=True)
    assert "IGNORED" == deliver(task, delivery_info={"redelivered": True}).info.state
    (line,) = own_lines(caplog)
    assert line.startswith("Task x[id-1] dropped: ")
    assert task.lock_key_for() in line


def test_lost_lease_is_logged_with_its_holder(
    singleton: Singleton, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line of a lost lease names the task, the node, the process and the key."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        lose_to_another(task, self.lease)

    deliver(task)
    key = task.lock_key_for()
    reported = threading.Event()
    execution.context_of(task.app).callbacks.call(reported.set)
    assert reported.wait(60)
    expected = (
        f"Task x[id-1] on node (pid {os.getpid()}) lost its lock and is still running (released_by_operator); key {key}"
    )
    assert expected in [record.getMessage() for record in caplog.records]


def test_control_characters_do_not_make_lines(
    singleton: Singleton, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The log escapes line breaks and other control characters in task ids, which come with messages."""

    @singleton(name="x", on_duplicate="raise")
    def task() -> None: ...

    with locked(task):
        deliver(task, task_id="id\n2\x1b[31m\u2028 é")
    (line,) = own_lines(caplog)
    assert line.startswith(r"Task x[id\n2\x1b[31m\u2028 é] failed as a duplicate: ")


def test_error_without_text_is_left_to_the_log_handlers() -> None:
    """The log filter passes on an error whose ``str`` fails, and raises nothing itself."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    arguments = ("a\n", 1, Mute())
    record = logging.LogRecord("celery_singleton_lock", logging.WARNING, "", 1, "%s %d %s", arguments, None)
    assert log.logger.filter(record)
    assert ("a\\n", *arguments[1:]) == record.args


# -- a grant that came too late ----------------------------------------------------------------


def test_late_grant_is_acquired_again(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A grant whose answer comes after the lease expired is acquired once more, and its TTL counts from then."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> Any:
        return self.lease.held, self.lease.remaining, assert_held(self).task_id

    store.on_answer = [lambda: clock.advance(31)]
    held, remaining, holder = deliver(task).retval
    assert (True, "id-1") == (held, holder)
    assert 29 < remaining <= 30
    assert 2 == len(store.acquired)
    assert_free(task)


def test_late_grant_that_another_acquired_meanwhile(
    singleton: Singleton, store: FakeStore, clock: MovableClock
) -> None:
    """A late grant is a duplicate if another task acquired the lock meanwhile; the other task keeps its lock."""

    @singleton(name="x", lock_ttl=30)
    def task() -> None:
        pytest.fail("must not run")

    def late() -> None:
        clock.advance(31)
        assert store.acquire(request_of_another(task)).status is AcquireStatus.GRANTED

    store.on_answer = [late]
    with recorded(signals.duplicate) as seen:
        assert "IGNORED" == deliver(task).info.state
    assert ["duplicate"] == seen
    assert "other" == assert_held(task).task_id


def test_grants_that_are_always_late_are_an_outage(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:
    """A store that always answers after the lease expired counts as unreachable."""

    @singleton(name="x", lock_ttl=30, on_store_error="raise")
    def task() -> None:
        pytest.fail("must not run")

    store.on_answer = [lambda: clock.advance(31)] * 2
    assert isinstance(deliver(task).info.retval, StoreUnavailable)
    assert_free(task)


# -- a lease lost before its body began --------------------------------------------------------


@pytest.mark.parametrize("main", [True, False], ids=["main thread", "other thread"])
def test_lost_before_the_body(singleton: Singleton, store: FakeStore, main: bool) -> None:
    """Under ``on_lock_lost="raise"`` a body whose lease is lost before its start does not start."""

    @singleton(name="x", on_lock_lost="raise")
    def task() -> None:
        pytest.fail("must not run")

    def lose(sender: Any, lease: Lease, **_: Any) -> None:
        lose_to_another(task, lease)

    outcomes: list[Any] = []
    signals.lock_acquired.connect(lose, weak=False)
    try:
        thread = threading.Thread(target=lambda: outcomes.append(deliver(task)))
        if main:
            thread.run()
        else:
            thread.start()
            thread.join()
    finally:
        signals.lock_acquired.disconnect(lose)
    (outcome,) = outcomes
    assert "FAILURE" == outcome.info.state
    assert isinstance(outcome.info.retval, LockLost)
    assert task.lock_key_for() in str(outcome.info.retval)
    assert "other" == assert_held(task).task_id


# -- an exception between grant and release ----------------------------------------------------

INTERRUPTIONS = [SoftTimeLimitExceeded, SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize("error", INTERRUPTIONS)
def test_interrupted_after_the_grant(singleton: Singleton, store: FakeStore, error: type[BaseException]) -> None:
    """An exception after the store's grant, before its answer is read, leaves no lock."""

    @singleton(name="x")
    def task() -> None:
        pytest.fail("must not run")

    store.on_answer = [raising(error())]
    with suppress(BaseException):
        deliver(task)
    assert 1 == len(store.acquired)
    renew_due(task)
    assert_free(task)


@pytest.mark.parametrize("error", INTERRUPTIONS)
def test_interrupted_in_the_release(singleton: Singleton, store: FakeStore, error: type[BaseException]) -> None:
    """An exception in the release, before the call to the store, leaves no lock."""

    @singleton(name="x")
    def task() -> None: ...

    store.on_release = [raising(error())]
    with suppress(BaseException):
        deliver(task)
    assert_free(task)


class Interruption:
    """Raises SystemExit at the n-th bytecode of one module, as a signal handler can."""

    def __init__(self, module: Any, left: int) -> None:
        self._file = module.__file__
        self.left = left
        self.where = ""

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 needs it before `settrace`
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        frame.f_trace = self._step  # Python 3.13 needs it before `f_trace_opcodes`
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"line {frame.f_lineno}"
                raise SystemExit
        return self._step


def deliver_interrupted(interruption: Interruption, task: Any) -> None:
    """Deliver a task that is interrupted."""
    with interruption, suppress(SystemExit):
        deliver(task)


@pytest.mark.parametrize("is_reachable", [True, False])
@pytest.mark.parametrize("on_lock_lost", ["warn", "raise"])
def test_interrupted_anywhere(
    singleton: Singleton, store: FakeStore, app: Any, on_lock_lost: str, is_reachable: bool
) -> None:
    """An exception at any place around the body leaves no lock and no renewal.

    The same holds where the store is unreachable at the first release.
    """

    @singleton(name="x", on_lock_lost=on_lock_lost)
    def task() -> None: ...

    deliver(task)
    renewer = execution.context_of(app).renewer
    places = 0
    for places in range(1, 10_000):
        store.on_release = [] if is_reachable else [raising(StoreUnavailable("unreachable"))]
        interruption = Interruption(execution, places)
        if is_reachable:
            deliver_interrupted(interruption, task)
        else:  # CPython may keep an error that a tracer raises in `except` as the handled one, so that thread must end
            thread = threading.Thread(target=deliver_interrupted, args=(interruption, task))
            thread.start()
            thread.join()
        store.on_release.clear()
        renewer.renew_due()
        assert {} == renewer._leases, f"interrupted at {interruption.where}"
        assert task.lock_holder() is None, f"interrupted at {interruption.where}"
        if interruption.left > 0:
            break
    assert 200 < places < 5000


def test_pending_releases_leave_no_receivers(singleton: Singleton, store: FakeStore) -> None:
    """Repeated pending releases add no receivers to Celery's signals and no finalizers."""

    @singleton(name="x")
    def task(number: int) -> None: ...

    store.failure = StoreUnavailable("unreachable")

    def leave(number: int) -> tuple[int, int]:
        deliver(task, number)
        return len(task_postrun.receivers), len(weakref.finalize._registry)  # type: ignore[attr-defined]

    assert leave(1) == leave(2) == leave(3)


def test_run_leaves_no_garbage(singleton: Singleton) -> None:
    """The arguments of a task are freed when it has ended: no cycle keeps them until Python collects garbage."""

    class Argument:
        """Something large."""

    @singleton(name="x", lock_key="key")
    def task(argument: Argument) -> None: ...

    def run() -> weakref.ref[Argument]:
        argument = Argument()
        deliver(task, argument)
        return weakref.ref(argument)

    run()  # what the first run imports and makes
    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_renewal_thread_that_cannot_start(singleton: Singleton, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body whose renewal thread cannot start does not run, and its lock is released; the next delivery starts the thread."""
    starts: list[Any] = []

    def start(target: Any) -> None:
        starts.append(target)
        if len(starts) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loop_module, "start_native_thread", start)

    @singleton(name="x")
    def task() -> str:
        return "ran"

    assert "RuntimeError" == type(deliver(task).info.retval).__name__
    assert_free(task)
    assert "ran" == deliver(task).retval
    assert 2 == len(starts)


# -- lock_released -----------------------------------------------------------------------------


def test_lock_released_is_sent_after_a_release(singleton: Singleton, store: FakeStore) -> None:
    """`lock_released` is sent once, after the store has released the lock."""
    holders: list[Any] = []

    @singleton(name="x")
    def task() -> None: ...

    def note(**_: Any) -> None:
        holders.append(task.lock_holder())

    signals.lock_released.connect(note, weak=False)
    try:
        deliver(task)
    finally:
        signals.lock_released.disconnect(note)
    assert [None] == holders


def test_signals_of_a_lock_until_the_start(make_app: MakeApp) -> None:
    """With ``lock_until="start"``, the lock is acquired and released before the body, and both signals have its key."""
    app, seen = make_app(), []

    @app.task(base=SingletonTask, name="x", lock_from="publish", lock_until="start", bind=True)
    def task(self: Any) -> None:
        seen.append(("body", self.lease.key, self.lease.protected))

    def note(signal: Any, lease: Lease, **_: Any) -> None:
        seen.append((signal.name, lease.key, lease.held))

    for signal in (signals.lock_acquired, signals.lock_released):
        signal.connect(note, weak=False)
    try:
        deliver(task)
    finally:
        for signal in (signals.lock_acquired, signals.lock_released):
            signal.disconnect(note)
    key = task.lock_key_for()
    assert [("lock_acquired", key, True), ("lock_released", key, False), ("body", key, False)] == seen


def test_lock_released_is_not_sent_for_another_holders_lock(singleton: Singleton, store: FakeStore) -> None:
    """`lock_released` is not sent for a lease that another holder has, and that holder keeps its lock."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        lose_to_another(task, self.lease)

    with recorded(signals.lock_released) as seen:
        assert deliver(task).info is None
    assert [] == seen
    assert "other" == assert_held(task).task_id


def test_lock_released_is_not_sent_past_the_deadline(
    singleton: Singleton, store: FakeStore, clock: MovableClock
) -> None:
    """A lease that was lost in an outage is released if the store still has it, but `lock_released` is not sent."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> bool:
        clock.advance(31)
        store.prolong(self.lease.key, 100)
        store.failure = StoreUnavailable("unreachable")
        with suppress(LockLost):
            self.lease.ensure()
        store.failure = None
        return self.lease._state.lost

    with recorded(signals.lock_released) as seen:
        assert deliver(task).retval is True
    assert [] == seen
    assert_free(task)


def test_lock_released_is_not_sent_for_a_failed_release(singleton: Singleton, store: FakeStore) -> None:
    """A failed release sends `store_error` instead of `lock_released`."""

    @singleton(name="x")
    def task() -> str:
        store.failure = StoreUnavailable("unreachable")
        return "ran"

    with recorded(signals.lock_released, signals.store_error) as seen:
        assert "ran" == deliver(task).retval
    assert ["store_error"] == seen


# -- an event that cannot be sent --------------------------------------------------------------


def test_skip_whose_event_cannot_be_sent(singleton: Singleton, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip whose event cannot be sent stays a skip and counts once for its chord."""
    chord_parts: list[str] = []
    attempts: list[str] = []

    def count(request: Any, state: str, result: Any, **_: Any) -> None:
        chord_parts.append(state)

    def fail(kind: str, **_: Any) -> None:
        attempts.append(kind)
        raise OperationalError("broker is unreachable")

    @singleton(name="x")
    def task() -> None: ...

    monkeypatch.setattr(app.backend, "on_chord_part_return", count)
    monkeypatch.setattr(task, "send_event", fail)
    properties = {"singleton": Delivery(events=True)}
    with locked(task):
        outcome = deliver(task, task_id="part", properties=properties, chord={"task": "body"}, ignore_result=False)
    assert "IGNORED" == outcome.info.state
    assert ["task-singleton-skipped"] == attempts
    assert ["SUCCESS"] == chord_parts
    assert "SUCCESS" == app.AsyncResult("part").state


# -- a body that forks -------------------------------------------------------------------------


def test_forked_process_owns_nothing(make_app: MakeApp, redis_server: RedisServer) -> None:
    """A process that the body forks does not release the lock, and `ensure` raises LockLost in it."""
    app = make_app(singleton_lock_url=redis_server.url(), singleton_lock_prefix="fork")
    parent = os.getpid()
    code = 9

    @app.task(base=SingletonTask, name="x", bind=True)
    def task(self: Any) -> Any:
        nonlocal code
        child = os.fork()
        if not child:
            self.lease._state.deadline = 0.0  # no thread renews in the forked process
            with suppress(LockLost):
                self.lease.ensure()
                return None
            code = 0
            raise SystemExit
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.lease._state.deadline = 0.0
        self.lease.ensure()  # over the parent's connection, which the child has not used
        return status, self.lock_holder().task_id

    try:
        outcome = deliver(app.tasks["x"])
    finally:
        if os.getpid() != parent:
            os._exit(code)
    assert (0, "id-1") == outcome.retval
    assert_free(app.tasks["x"])


# -- a message that cannot be published again --------------------------------------------------

#: Options under which a task is published again, and the error where that fails.
REPUBLISH_REASONS = [({"on_duplicate": "retry"}, DuplicateTask), ({"on_store_error": "retry"}, StoreUnavailable)]


def deliver_without_lock(task: Any, store: FakeStore, *args: Any) -> Any:
    """Deliver a task that cannot acquire its lock now."""
    if task.on_duplicate:
        with locked(task, *args):
            return deliver(task, *args)
    store.on_answer = [raising(StoreUnavailable("unreachable"))]
    outcome = deliver(task, *args)
    renew_due(task)
    return outcome


@pytest.mark.parametrize(("options", "error"), REPUBLISH_REASONS)
def test_message_that_can_never_be_published(
    singleton: Singleton, store: FakeStore, options: Any, error: type[Exception]
) -> None:
    """A message that cannot be serialized fails its task; back in its queue it would return for ever."""

    @singleton(name="x", acks_late=True, unique_on=[], **options)
    def task(thing: object) -> None:
        pytest.fail("must not run")

    outcome = deliver_without_lock(task, store, object())
    assert "FAILURE" == outcome.info.state
    assert isinstance(outcome.info.retval, error)
    assert isinstance(outcome.info.retval.__cause__, EncodeError)
    assert_free(task, 1)


@pytest.mark.parametrize(("options", "error"), REPUBLISH_REASONS)
@pytest.mark.parametrize("late", [True, False])
def test_unreachable_broker(
    singleton: Singleton, store: FakeStore, app: Any, options: Any, error: type[Exception], late: bool
) -> None:
    """A message that cannot be published is requeued under ``acks_late``; otherwise the task fails."""
    app.conf.update(
        broker_url=f"redis://127.0.0.1:{free_port()}/0",
        broker_transport_options={"max_retries": 0},
        task_publish_retry=False,
    )

    @singleton(name="x", acks_late=late, **options)
    def task() -> None:
        pytest.fail("must not run")

    outcome = deliver_without_lock(task, store)
    if late:
        assert "REJECTED" == outcome.info.state
        assert isinstance(outcome.info.retval, Reject)
        assert outcome.info.retval.requeue is True
        assert isinstance(outcome.info.retval.reason, (OperationalError, OSError))
    else:
        assert "FAILURE" == outcome.info.state
        assert isinstance(outcome.info.retval, error)
    assert_free(task)


# -- delays that would never end, or never begin -----------------------------------------------


@pytest.mark.parametrize("name", ["delay", "max_delay"])
@pytest.mark.parametrize("value", [0, 0.0, 0.001, float("inf"), 1e12])
def test_delays_are_bounded(name: str, value: float) -> None:
    """RetryLater refuses a delay near zero, which would keep the broker busy, and one that no broker can express."""
    with pytest.raises(ConfigurationError, match=f"RetryLater: {name}="):
        RetryLater(**{name: value})
