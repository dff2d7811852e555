"""What happens around a body when something strikes: lost answers, late grants, losses, signals, forks, a broker that is away."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
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
from celery_singleton_lock.renewal import loop as loop_module
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, LeaseRequest, RenewResult
from celery_singleton_lock.testing import assert_free, assert_held, hold
from celery_singleton_lock.worker import execution
from celery_singleton_lock.worker.delivery import Delivery, new_token
from tests.servers import RedisServer, free_port
from tests.unit.conftest import MakeApp
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]


class Ahead:
    """The clock, put forward by a test."""

    def __init__(self) -> None:
        self.by = 0.0

    def __call__(self) -> float:
        return now() + self.by

    def advance(self, seconds: float) -> None:
        self.by += seconds


class Store(MemoryStore):
    """A store in memory whose answers may be lost or late, and which can be away."""

    def __init__(self, clock: Ahead) -> None:
        super().__init__(clock)
        self.acquired: list[str] = []
        self.released: list[str] = []
        self.answering: list[Callable[[], object]] = []  # what happens to the next answers of `acquire` and `reacquire`
        self.releasing: list[Callable[[], object]] = []  # what happens to the next calls of `release`
        self.settling: list[Callable[[], object]] = []  # what happens to the next calls of `record_outcome`
        self.away = False

    def acquire(self, claim: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        verdict = super().acquire(claim, timeout)
        self.acquired.append(claim.token)
        if self.answering:
            self.answering.pop(0)()
        return verdict

    def reacquire(self, claim: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        answer = super().reacquire(claim, fence, timeout)
        if self.answering:
            self.answering.pop(0)()
        return answer

    def renew(self, claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        if self.away:
            raise StoreUnavailable("away")
        return super().renew(claims, timeout)

    def record_outcome(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        if self.settling:
            self.settling.pop(0)()
        super().record_outcome(claim, success)

    def release(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        if self.away:
            raise StoreUnavailable("away")
        if self.releasing:
            self.releasing.pop(0)()
        self.released.append(claim.token)
        return super().release(claim, success)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    made = Ahead()
    monkeypatch.setattr(execution, "now", made)
    monkeypatch.setattr(lease_module, "now", made)
    return made


@pytest.fixture
def store(app: Any, clock: Ahead) -> Iterator[Store]:
    """The store of `app`, whose renewal thread does not start: tests renew by themselves."""
    store = Store(clock)
    context = ProcessContext(settings_of(app.conf), store=store)
    context.body_renewal = BodyRenewal(store, store, context.events, clock)
    context.renewer = Renewer(store, context.body_renewal, context.events.loop_failed, clock)
    context.renewer._loop.wake = lambda at: None  # type: ignore[method-assign]
    replace_context(app, context)
    yield store
    reported = threading.Event()  # all that is still to be reported, which the next test must not hear
    context.callbacks.call(reported.set)
    assert reported.wait(5)


def raising(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def renew_due(task: Any) -> float:
    """Let the renewal thread do what is due, as it does at once in a worker."""
    return execution.context_of(task.app).renewer.renew_due()


def others(task: Any, *args: Any) -> LeaseRequest:
    """Another task's claim on the same call."""
    plan = config_for(task)
    return LeaseRequest(plan.base, plan.digest(args, {}), "others-token", 600.0, "other")


def take(task: Any, lease: Lease) -> None:
    """Let an operator free this lease's lock, another task get it, and the renewer find that out."""
    context, state = execution.context_of(task.app), lease._state
    task.force_unlock()
    assert context.store.acquire(others(task)).status is AcquireStatus.GRANTED
    assert state is not None
    assert not context.body_renewal.verify(state)
    assert state.lost


@contextmanager
def heard(*wanted: Any) -> Iterator[list[str]]:
    """Notes which of these signals are sent."""
    seen: list[str] = []
    names = {id(signal): name for name, signal in vars(signals).items() if signal in wanted}

    def note(signal: Any, **_: Any) -> None:
        seen.append(names[id(signal)])

    for signal in wanted:
        signal.connect(note, weak=False)
    try:
        yield seen
    finally:
        for signal in wanted:
            signal.disconnect(note)


# -- a grant whose answer was lost -------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "state"), [("run", None), ("raise", "FAILURE"), ("retry", "FAILURE")], ids=["run", "raise", "retry"]
)
def test_grant_without_an_answer_is_given_back(singleton: Singleton, store: Store, option: str, state: Any) -> None:
    """What the store granted though its client saw an outage is given back at the end, whatever is done meanwhile."""
    protected: list[bool] = []

    @singleton(name="x", bind=True, on_store_error=option)
    def task(self: Any) -> None:
        protected.append(self.lease.protected)

    store.answering = [raising(StoreUnavailable("the answer was lost"))]
    result = task.apply()  # eagerly nothing can be tried again later
    assert (state or "SUCCESS") == result.state
    if state:
        assert isinstance(result.result, StoreUnavailable)
    assert ([] if state else [False]) == protected
    renew_due(task)
    assert store.acquired == store.released
    assert_free(task)


def test_grant_without_an_answer_is_given_back_before_the_next_look(singleton: Singleton, store: Store) -> None:
    """A task that is published again for want of an answer does not then meet its own lock."""

    @singleton(name="x", on_store_error="retry")
    def task() -> str:
        return "ran"

    store.answering = [raising(StoreUnavailable("the answer was lost"))]
    assert "RETRY" == deliver(task).info.state
    renew_due(task)
    assert_free(task)
    assert "ran" == deliver(task).retval


def test_outage_that_lasts_changes_no_outcome(singleton: Singleton, store: Store) -> None:
    """Where it cannot be given back either, the task's outcome is what it was; the renewal thread does it later."""

    @singleton(name="x", on_store_error="run")
    def task() -> str:
        store.away = True
        return "ran"

    store.answering = [raising(StoreUnavailable("the answer was lost"))]
    assert "ran" == deliver(task).retval
    assert assert_held(task).task_id == "id-1"
    store.away = False
    renew_due(task)
    assert_free(task)


def test_grant_that_comes_later_is_given_back(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """A store that does what it was asked after it has been asked to undo that leaves no lock either."""

    @singleton(name="x", on_store_error="retry")
    def task() -> None: ...

    store.answering = [raising(StoreUnavailable("the answer was lost"))]
    deliver(task)
    renewer = execution.context_of(task.app).renewer
    (claim,) = (pending.request for pending in renewer._pending._pending.values())
    renewer.renew_due()
    assert store.acquire(claim).status is AcquireStatus.GRANTED
    clock.advance(claim.ttl / 12)
    renewer.renew_due()
    assert_free(task)


def test_duplicate_gives_nothing_back(singleton: Singleton, store: Store) -> None:
    """A duplicate has nothing to give back: one call and no more."""

    @singleton(name="x")
    def task() -> None: ...

    with hold(task):
        assert "IGNORED" == deliver(task).info.state
        assert [] == store.released


# -- a release that the store did not confirm ---------------------------------------------------


@pytest.mark.parametrize("arrived", [False, True], ids=["not done", "done unheard"])
def test_release_is_made_up_for(singleton: Singleton, store: Store, clock: Ahead, arrived: bool) -> None:
    """What could not be released is released when the store is back, not a TTL later; nobody else's lock is."""

    @singleton(name="x", lock_ttl=30)
    def task() -> None:
        store.away = True

    deliver(task)
    renewer = execution.context_of(task.app).renewer
    renewer.renew_due()
    assert "id-1" == assert_held(task).task_id
    store.away = False
    if arrived:
        task.force_unlock()
        assert store.acquire(others(task)).status is AcquireStatus.GRANTED
    clock.advance(3)
    renewer.renew_due()
    if arrived:
        assert "other" == assert_held(task).task_id
    else:
        assert_free(task)


@pytest.mark.parametrize("success", [True, False], ids=["success", "failure"])
@pytest.mark.parametrize("arrived", [False, True], ids=["not done", "done unheard"])
def test_waiting_copy_learns_the_end_later(singleton: Singleton, store: Store, arrived: bool, success: bool) -> None:
    """A copy of the message is dropped after a success, and runs after a failure, though the release was not confirmed."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        assert store.acquire(copy).status is AcquireStatus.HELD  # and it waits from now on

        def release() -> None:
            if arrived:
                MemoryStore.release(store, self.lease._state.request, success)
            raise StoreUnavailable("no answer")

        claims.append(self.lease._state.request)
        store.releasing = [release]
        if not success:
            raise ValueError("failed")

    claims: list[LeaseRequest] = []
    copy = LeaseRequest(config_for(task).base, config_for(task).digest((), {}), "copy", 600.0, "id-1", redelivered=True)
    deliver(task)
    renew_due(task)
    assert (AcquireStatus.COMPLETED if success else AcquireStatus.GRANTED) is store.acquire(copy).status


def test_waiting_copy_learns_a_success_that_could_not_be_told(singleton: Singleton, store: Store) -> None:
    """A store that is away just when the result has been stored is told of it as soon as it is back."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        assert store.acquire(copy).status is AcquireStatus.HELD  # and it waits from now on
        store.settling = [raising(StoreUnavailable("away"))]

    copy = LeaseRequest(config_for(task).base, config_for(task).digest((), {}), "copy", 600.0, "id-1", redelivered=True)
    deliver(task)
    assert store.acquire(copy).status is AcquireStatus.HELD
    renew_due(task)
    assert store.acquire(copy).status is AcquireStatus.COMPLETED


def test_waiting_copy_waits_while_the_result_is_stored(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """However long the hooks after a success take, a copy waits for their end; then it is dropped, and nothing is renewed."""

    class Slow(SingletonTask):
        def on_success(self, *_: Any, **__: Any) -> None:
            for _ in range(4):
                clock.advance(20)
                renew_due(task)
                answers.append(store.acquire(copy).status)  # the tracer would swallow an error here

    @singleton(name="x", base=Slow, lock_ttl=30)
    def task() -> None:
        assert store.acquire(copy).status is AcquireStatus.HELD  # and it waits from now on

    answers: list[AcquireStatus] = []
    copy = LeaseRequest(config_for(task).base, config_for(task).digest((), {}), "copy", 600.0, "id-1", redelivered=True)
    assert deliver(task).info is None
    assert [AcquireStatus.HELD] * 4 == answers
    assert store.acquire(copy).status is AcquireStatus.COMPLETED
    for _ in range(2):
        clock.advance(3)
        due = renew_due(task)
    assert math.inf == due


def test_lease_that_was_taken_again_is_released_again(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """A store that comes to the call that took a lease again when it has been released leaves no lock."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> None:
        task.force_unlock()
        store._records.clear()
        clock.advance(10)
        store.answering = [raising(StoreUnavailable("stopped"))]
        renew_due(task)
        store._records.clear()  # it has not come to that call yet
        claims.append(self.lease._state.request)

    claims: list[LeaseRequest] = []
    deliver(task)
    assert_free(task)
    assert store.reacquire(claims[0], 0) == (RenewResult.RENEWED, True)
    renewer = execution.context_of(task.app).renewer
    for _ in range(2):
        renewer.renew_due()
        clock.advance(3)
    assert_free(task)


def test_lease_that_another_has_since_it_was_taken_again(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """The same where that call timed out, and another run has taken the lock before the store comes to it."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> None:
        store._records.clear()
        clock.advance(10)
        store.answering = [raising(StoreUnavailable("stopped"))]
        renewer.renew_due()
        store._records.clear()  # it has not come to that call yet
        store.acquire(others(task))
        clock.advance(3)
        renewer.renew_due()
        assert not self.lease.held
        claims.append(self.lease._state.request)

    claims: list[LeaseRequest] = []
    renewer = execution.context_of(task.app).renewer
    deliver(task)
    assert "other" == assert_held(task).task_id
    task.force_unlock()
    assert store.reacquire(claims[0], 0) == (RenewResult.LOST, True)
    for _ in range(2):
        renewer.renew_due()
        clock.advance(3)
    assert_free(task)


@pytest.mark.parametrize("done", [False, True], ids=["not done yet", "done"])
def test_released_lease_is_out_of_the_renewer_first(
    singleton: Singleton, store: Store, clock: Ahead, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """While the store is asked to release a lease, the renewal thread neither renews it nor takes it again, due as it is."""
    asked: list[str] = []

    def noted(verb: str, then: Callable[[], object] = lambda: None, first: Callable[[], object] = lambda: None) -> None:
        call = getattr(store, verb)

        def instead(*args: Any, **kwargs: Any) -> Any:
            asked.append(verb)
            first()
            answer = call(*args, **kwargs)
            then()
            return answer

        monkeypatch.setattr(store, verb, instead)

    def sweep() -> None:  # that of the body shows that a sweep renews
        clock.advance(15)  # past a third of the TTL, and not past the deadline
        renew_due(task)

    @singleton(name="x", lock_ttl=30)
    def task() -> None:
        sweep()

    noted("acquire")
    noted("renew")
    noted("release", **{"then" if done else "first": sweep})
    deliver(task)
    assert ["acquire", "renew", "release"] == asked
    assert_free(task)


# -- another delivery of the same message --------------------------------------------------------


def check_redelivery(task: Any, state: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Deliver a message whose task id holds the lock; return the delay and the retry state of the published message."""
    app = task.app
    runtime = execution.context_of(app)
    claim = LeaseRequest(config_for(task).base, config_for(task).digest((), {}), "first-delivery", 600.0, "id-1")
    assert runtime.store.acquire(claim).status is AcquireStatus.GRANTED
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.clear()
        before = datetime.now(timezone.utc)
        assert "IGNORED" == deliver(task, headers={"singleton_retry_state": state}).info.state
        headers = queue.get(timeout=5).headers
    return (datetime.fromisoformat(headers["eta"]) - before).total_seconds(), headers["singleton_retry_state"]


@pytest.mark.parametrize("policy", ["skip", "raise", "retry", RetryLater(delay=2, max_wait=1)])
def test_first_redelivery_check_comes_soon(singleton: Singleton, store: Store, policy: Any) -> None:
    """The first redelivery check comes after 0.2 s, however often the message was published again as a duplicate."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    delay, header = check_redelivery(task, {"times": 7, "waited": 90.0})
    assert 0.2 <= delay < 0.4
    assert {"times": 7, "waited": 90.0, "redelivery_checks": 1} == header


@pytest.mark.parametrize(("checks", "delay"), [(1, 0.4), (3, 1.6), (20, 2.0), (2000, 2.0)])
def test_redelivery_checks_slow_down_to_the_policys_delay(
    singleton: Singleton, store: Store, checks: int, delay: float
) -> None:
    """The delay between redelivery checks doubles up to the policy's delay, and does not count for max_wait."""

    @singleton(name="x", on_duplicate=RetryLater(delay=2, max_wait=1))
    def task() -> None: ...

    found, header = check_redelivery(task, {"times": 1, "waited": 0.5, "redelivery_checks": checks})
    assert delay <= found < delay + 0.2
    assert {"times": 1, "waited": 0.5, "redelivery_checks": checks + 1} == header


def test_redelivery_checks_start_again_after_a_wait_for_others(singleton: Singleton, store: Store) -> None:
    """After a message was published again as a duplicate of other work, its next redelivery check counts as the first."""

    @singleton(name="x", on_duplicate="retry")
    def task() -> None: ...

    with hold(task):
        outcome = deliver(task, headers={"singleton_retry_state": {"times": 1, "waited": 5.0, "redelivery_checks": 4}})
    (header,) = (outcome.info.retval.sig.options["headers"]["singleton_retry_state"],)
    assert (2, 0) == (header["times"], header["redelivery_checks"])


def test_own_retry_does_not_carry_the_retry_state(singleton: Singleton, store: Store, app: Any) -> None:
    """The message of a task's own retry has the headers of others, but not our retry state: its waiting starts anew."""
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


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}], ids=["own", "auto"])
def test_attempt_does_not_travel_with_retries(singleton: Singleton, store: Store, app: Any, options: Any) -> None:
    """The message of a retry, one's own or Celery's, has neither the attempt's token nor a property of ours."""

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


def test_refused_acquire_is_logged(singleton: Singleton, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A store that refuses raises, under any setting, and is named in one WARNING with key and task id."""

    @singleton(name="x", on_store_error="run")
    def task() -> None:
        pytest.fail("must not run")

    store.answering = [raising(StoreError("NOPERM"))]
    with heard(signals.store_error) as seen:
        assert isinstance(deliver(task).info.retval, StoreError)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "celery_singleton_lock"]
    assert f"Task x[id-1] could not acquire {task.lock_key_for()}: NOPERM" == line
    assert ["store_error"] == seen


def test_dropped_copy_is_logged(singleton: Singleton, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The line of a copy that is dropped has its task id and the key."""

    @singleton(name="x")
    def task() -> None:
        pytest.fail("must not run")

    caplog.set_level("INFO", "celery_singleton_lock")
    claim = LeaseRequest(config_for(task).base, config_for(task).digest((), {}), "first-delivery", 600.0, "id-1")
    store.record_outcome(claim, success=True)
    assert "IGNORED" == deliver(task, delivery_info={"redelivered": True}).info.state
    (line,) = [r.getMessage() for r in caplog.records if r.name == "celery_singleton_lock"]
    assert line.startswith("Task x[id-1] dropped: ")
    assert task.lock_key_for() in line


def test_lost_lease_is_logged_with_its_holder(
    singleton: Singleton, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of a loss says which task, where it runs, and which key."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        take(task, self.lease)

    deliver(task)
    key = task.lock_key_for()
    told = threading.Event()
    execution.context_of(task.app).callbacks.call(told.set)
    assert told.wait(5)
    wanted = f"Task x[id-1] on node (pid {os.getpid()}) lost its lock {key} and is still running"
    assert wanted in [record.getMessage() for record in caplog.records]


def test_control_characters_do_not_make_lines(
    singleton: Singleton, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids come with messages: a line break in one is escaped, as are other control characters."""

    @singleton(name="x", on_duplicate="raise")
    def task() -> None: ...

    with hold(task):
        deliver(task, task_id="id\n2\x1b[31m\u2028 é")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "celery_singleton_lock"]
    assert line.startswith(r"Task x[id\n2\x1b[31m\u2028 é] failed as a duplicate: ")


def test_log_of_an_error_that_cannot_be_shown() -> None:
    """An error whose text cannot be made is left to the log's handlers: whoever logs it meets no error."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    arguments = ("a\n", 1, Mute())
    record = logging.LogRecord("celery_singleton_lock", logging.WARNING, "", 1, "%s %d %s", arguments, None)
    assert log.logger.filter(record)
    assert ("a\\n", *arguments[1:]) == record.args


# -- a grant that came too late ----------------------------------------------------------------


def test_late_grant_is_asked_for_again(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """A grant that is answered when its lease has expired is asked for once more, and counts from then on."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> Any:
        return self.lease.held, self.lease.remaining, assert_held(self).task_id

    store.answering = [lambda: clock.advance(31)]
    held, remaining, holder = deliver(task).retval
    assert (True, "id-1") == (held, holder)
    assert 29 < remaining <= 30
    assert 2 == len(store.acquired)
    assert_free(task)


def test_late_grant_that_another_has_by_then(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """Has another task got the lock by then, this one is a duplicate, and the lock stays the other's."""

    @singleton(name="x", lock_ttl=30)
    def task() -> None:
        pytest.fail("must not run")

    def late() -> None:
        clock.advance(31)
        assert store.acquire(others(task)).status is AcquireStatus.GRANTED

    store.answering = [late]
    with heard(signals.duplicate) as seen:
        assert "IGNORED" == deliver(task).info.state
    assert ["duplicate"] == seen
    assert "other" == assert_held(task).task_id


def test_grants_that_are_always_late_are_an_outage(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """A store that answers more slowly than its leases live is one that cannot be reached."""

    @singleton(name="x", lock_ttl=30, on_store_error="raise")
    def task() -> None:
        pytest.fail("must not run")

    store.answering = [lambda: clock.advance(31)] * 2
    assert isinstance(deliver(task).info.retval, StoreUnavailable)
    assert_free(task)


# -- a lease lost before its body began --------------------------------------------------------


@pytest.mark.parametrize("main", [True, False], ids=["main thread", "other thread"])
def test_lost_before_the_body(singleton: Singleton, store: Store, main: bool) -> None:
    """Under ``on_lock_lost="raise"`` a lease that is lost before its body has begun keeps it from beginning."""

    @singleton(name="x", on_lock_lost="raise")
    def task() -> None:
        pytest.fail("must not run")

    def lose(sender: Any, lease: Lease, **_: Any) -> None:
        take(task, lease)

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


# -- struck between grant and release ----------------------------------------------------------

STRIKES = [SoftTimeLimitExceeded, SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize("error", STRIKES)
def test_struck_with_the_grant(singleton: Singleton, store: Store, error: type[BaseException]) -> None:
    """An exception that strikes when the store has granted, but before that is known, leaves no lock."""

    @singleton(name="x")
    def task() -> None:
        pytest.fail("must not run")

    store.answering = [raising(error())]
    with suppress(BaseException):
        deliver(task)
    assert 1 == len(store.acquired)
    renew_due(task)
    assert_free(task)


@pytest.mark.parametrize("error", STRIKES)
def test_struck_in_the_release(singleton: Singleton, store: Store, error: type[BaseException]) -> None:
    """One that strikes in the release, before the store was told, leaves none either."""

    @singleton(name="x")
    def task() -> None: ...

    store.releasing = [raising(error())]
    with suppress(BaseException):
        deliver(task)
    assert_free(task)


class Strike:
    """Raises at the n-th bytecode of one module, as an exception of a signal handler can."""

    def __init__(self, module: Any, left: int) -> None:
        self._file = module.__file__
        self.left = left
        self.where = ""

    def __enter__(self) -> Strike:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 wants to know before
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        frame.f_trace = self._step  # Python 3.13 wants it first
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


def struck(strike: Strike, task: Any) -> None:
    """Deliver a task that is struck."""
    with strike, suppress(SystemExit):
        deliver(task)


@pytest.mark.parametrize("is_released", [True, False])
@pytest.mark.parametrize("on_lock_lost", ["warn", "raise"])
def test_struck_anywhere(singleton: Singleton, store: Store, app: Any, on_lock_lost: str, is_released: bool) -> None:
    """Wherever around the body an exception strikes, no lock is left, and nothing is renewed any more.

    The same where the store cannot be reached at the first release.
    """

    @singleton(name="x", on_lock_lost=on_lock_lost)
    def task() -> None: ...

    deliver(task)
    renewer = execution.context_of(app).renewer
    places = 0
    for places in range(1, 10_000):
        store.releasing = [] if is_released else [raising(StoreUnavailable("away"))]
        strike = Strike(execution, places)
        if is_released:
            struck(strike, task)
        else:  # CPython may take an error for handled for ever that a tracer strikes in `except`: that thread ends
            thread = threading.Thread(target=struck, args=(strike, task))
            thread.start()
            thread.join()
        store.releasing.clear()
        renewer.renew_due()
        assert {} == renewer._leases, f"struck at {strike.where}"
        assert task.lock_holder() is None, f"struck at {strike.where}"
        if strike.left > 0:
            break
    assert 200 < places < 5000


def test_ends_that_leave_something_keep_nothing(singleton: Singleton, store: Store) -> None:
    """However often something is left, Celery keeps one receiver, and no finalizers of it."""

    @singleton(name="x")
    def task(number: int) -> None: ...

    store.away = True

    def leave(number: int) -> tuple[int, int]:
        deliver(task, number)
        return len(task_postrun.receivers), len(weakref.finalize._registry)  # type: ignore[attr-defined]

    assert leave(1) == leave(2) == leave(3)


def test_renewal_thread_that_cannot_start(singleton: Singleton, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body whose lease nobody could renew does not begin, and its lock is free; the next one's thread is started."""
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


def test_released_is_told_of_a_release(singleton: Singleton, store: Store) -> None:
    """A release is told once, after the store has done it."""
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


def test_released_is_not_told_of_a_lock_that_another_has(singleton: Singleton, store: Store) -> None:
    """A lease that was lost to another is not released."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        take(task, self.lease)

    with heard(signals.lock_released) as seen:
        assert deliver(task).info is None
    assert [] == seen
    assert "other" == assert_held(task).task_id


def test_released_is_not_told_of_a_lease_past_its_deadline(singleton: Singleton, store: Store, clock: Ahead) -> None:
    """A lease that was lost to an outage is given back where the store still has it, but not reported as released."""

    @singleton(name="x", bind=True, lock_ttl=30)
    def task(self: Any) -> bool:
        clock.advance(31)
        store._records[self.lease.key].expires += 100
        store.away = True
        with suppress(LockLost):
            self.lease.ensure()
        store.away = False
        return self.lease._state.lost

    with heard(signals.lock_released) as seen:
        assert deliver(task).retval is True
    assert [] == seen
    assert_free(task)


def test_released_is_not_told_when_it_failed(singleton: Singleton, store: Store) -> None:
    """A lock that could not be given back has not been released: the store's error is told instead."""

    @singleton(name="x")
    def task() -> str:
        store.away = True
        return "ran"

    with heard(signals.lock_released, signals.store_error) as seen:
        assert "ran" == deliver(task).retval
    assert ["store_error"] == seen


# -- an event that cannot be sent --------------------------------------------------------------


def test_skip_whose_event_cannot_be_sent(singleton: Singleton, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip stays a skip, and counts once for its chord, though the event that tells of it cannot be sent."""
    parts: list[str] = []
    tried: list[str] = []

    def count(request: Any, state: str, result: Any, **_: Any) -> None:
        parts.append(state)

    def away(kind: str, **_: Any) -> None:
        tried.append(kind)
        raise OperationalError("broker is away")

    @singleton(name="x")
    def task() -> None: ...

    monkeypatch.setattr(app.backend, "on_chord_part_return", count)
    monkeypatch.setattr(task, "send_event", away)
    properties = {"singleton": Delivery(events=True)}
    with hold(task):
        outcome = deliver(task, task_id="part", properties=properties, chord={"task": "body"}, ignore_result=False)
    assert "IGNORED" == outcome.info.state
    assert ["task-singleton-skipped"] == tried
    assert ["SUCCESS"] == parts
    assert "SUCCESS" == app.AsyncResult("part").state


# -- a body that forks -------------------------------------------------------------------------


def test_process_that_the_body_forked_owns_nothing(make_app: MakeApp, redis_server: RedisServer) -> None:
    """A child of the body that ends the way its parent would frees nothing, and its `ensure` says that it owns nothing."""
    app = make_app(singleton_lock_url=redis_server.url(), singleton_lock_prefix="fork")
    parent = os.getpid()
    code = 9

    @app.task(base=SingletonTask, name="x", bind=True)
    def task(self: Any) -> Any:
        nonlocal code
        child = os.fork()
        if not child:
            self.lease._state.deadline = 0.0  # nobody renews in a child
            with suppress(LockLost):
                self.lease.ensure()
                return None
            code = 0
            raise SystemExit
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.lease._state.deadline = 0.0
        self.lease.ensure()  # over the connection that the child has not touched
        return status, self.lock_holder().task_id

    try:
        outcome = deliver(app.tasks["x"])
    finally:
        if os.getpid() != parent:
            os._exit(code)
    assert (0, "id-1") == outcome.retval
    assert_free(app.tasks["x"])


# -- a message that cannot be published again --------------------------------------------------

#: Why a task may have to be published again, and what it fails with where that cannot be done.
WAYS = [({"on_duplicate": "retry"}, DuplicateTask), ({"on_store_error": "retry"}, StoreUnavailable)]


def wanting(task: Any, store: Store, *args: Any) -> Any:
    """Deliver to a task that cannot have its lock now."""
    if task.on_duplicate:
        with hold(task, *args):
            return deliver(task, *args)
    store.answering = [raising(StoreUnavailable("away"))]
    outcome = deliver(task, *args)
    renew_due(task)
    return outcome


@pytest.mark.parametrize(("options", "error"), WAYS)
def test_message_that_can_never_be_published(
    singleton: Singleton, store: Store, options: Any, error: type[Exception]
) -> None:
    """One that cannot be written at all fails: put back into its queue it would return for ever."""

    @singleton(name="x", acks_late=True, unique_on=[], **options)
    def task(thing: object) -> None:
        pytest.fail("must not run")

    outcome = wanting(task, store, object())
    assert "FAILURE" == outcome.info.state
    assert isinstance(outcome.info.retval, error)
    assert isinstance(outcome.info.retval.__cause__, EncodeError)
    assert_free(task, 1)


@pytest.mark.parametrize(("options", "error"), WAYS)
@pytest.mark.parametrize("late", [True, False])
def test_broker_that_is_away(
    singleton: Singleton, store: Store, app: Any, options: Any, error: type[Exception], late: bool
) -> None:
    """Late acknowledged, a message that the broker does not take goes back into its queue; else the task fails."""
    app.conf.update(
        broker_url=f"redis://127.0.0.1:{free_port()}/0",
        broker_transport_options={"max_retries": 0},
        task_publish_retry=False,
    )

    @singleton(name="x", acks_late=late, **options)
    def task() -> None:
        pytest.fail("must not run")

    outcome = wanting(task, store)
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
def test_delays_are_real(name: str, value: float) -> None:
    """A delay of nothing would keep the broker busy, and one without end no broker can express: both are refused."""
    with pytest.raises(ConfigurationError, match=f"RetryLater: {name}="):
        RetryLater(**{name: value})
