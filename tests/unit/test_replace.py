"""`Replace`: what the policy decides, and how a holder learns that it is to stop."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore

from celery_singleton_lock import ConfigurationError, Holder, LockLost, Replace, StoreUnavailable
from celery_singleton_lock import lease as lease_module
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.lease import Lease, LeaseState
from celery_singleton_lock.line.joining import terminate
from celery_singleton_lock.policies import as_policy, portable_policy
from celery_singleton_lock.policies.decisions import Duplicate, Enqueue, Fail, RunLater, SkipRun
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.store.protocol import RenewResult
from celery_singleton_lock.store.records import RunRecord
from celery_singleton_lock.store.requests import LeaseSpec, Place
from celery_singleton_lock.worker import replaced
from tests.unit.conftest import Clock, attempt_with
from tests.unit.fake_store import FakeStore
from tests.unit.test_renewer import Events, Fired
from tests.unit.test_task import deliver

Singleton = Callable[..., Any]
HOLDER = Holder("id-1", "node@host", 4711, 1.5, 28.5)
TTL = 60.0


# -- the policy ------------------------------------------------------------------------------------


def test_name_and_message() -> None:
    """The name stands for the policy with its defaults; a message carries the fields that differ."""
    assert Replace(grace=10.0, max_wait=3600.0) == as_policy("replace")
    policy = Replace(5, math.inf)
    assert policy == portable_policy(policy.__json__())


@pytest.mark.parametrize("field", ["grace", "max_wait"])
@pytest.mark.parametrize("value", [-1, math.nan, True, "3", None])
def test_bad_values(field: str, value: Any) -> None:
    """A value that is out of range is refused, naming the field."""
    with pytest.raises(ConfigurationError, match=field):
        Replace(**{field: value})


@pytest.mark.parametrize(
    ("asked", "within", "terminate"),
    [(0.0, 10.1, False), (4.0, 6.1, False), (9.9, 0.2, False), (10.0, 3600.0, True), (99.0, 3600.0, True)],
)
def test_grace(asked: float, within: float, terminate: bool) -> None:
    """The holder is asked to stop; the message comes back when the time of grace is over, and has it terminated."""
    decision = Replace().decide(Duplicate(HOLDER, asked=asked))
    assert isinstance(decision, Enqueue)
    assert (1, True, True) == (decision.room, decision.replace, decision.stop)
    assert (pytest.approx(within), terminate) == (decision.within, decision.terminate)


def test_who_is_terminated() -> None:
    """Only a body that runs is terminated: not a message that waits, nor a cooldown, nor with an endless time of grace."""
    for state in ("queued", "cooldown"):
        duplicate = Duplicate(Holder("id-1", state=state), asked=20.0)
        assert Enqueue(1, True, stop=True, within=3600.0, gives_way=True) == Replace().decide(duplicate)
    endless = Replace(grace=math.inf, max_wait=math.inf).decide(Duplicate(HOLDER, asked=1e6))
    assert Enqueue(1, True, stop=True, gives_way=True) == endless


def test_others_in_line() -> None:
    """A newcomer takes the place of a message that waits; one that lost its place does not win it back."""
    assert isinstance(Replace().decide(Duplicate(HOLDER, waiting=1, head="other")), Enqueue)
    goes_on = Duplicate(HOLDER, waiting=1, head="own", is_waiting=True, has_waited=True)
    assert Enqueue(1, stop=True, within=3600.0, gives_way=True) == Replace(grace=math.inf).decide(goes_on)
    assert SkipRun(pending="newer") == Replace().decide(Duplicate(HOLDER, waiting=1, head="newer", has_waited=True))


def test_longest_wait_and_own_retry() -> None:
    """A message fails after `max_wait`; a task's own retry is postponed, and replaces nobody."""
    assert Fail() == Replace(max_wait=60).decide(Duplicate(HOLDER, waited=60.0))
    almost = Replace(max_wait=60).decide(Duplicate(HOLDER, waited=59.0))
    assert isinstance(almost, Enqueue) and almost.within == 1.0
    assert isinstance(Replace().decide(Duplicate(HOLDER, own_retry=True)), RunLater)


def test_only_one_holder(singleton: Singleton) -> None:
    """With a `lock_limit`, a newcomer would not know whom to replace."""
    with pytest.raises(ConfigurationError, match="lock_limit"):

        @singleton(name="x", on_duplicate="replace", lock_limit=2)
        def task() -> None:
            pytest.fail("must not run")


# -- the holder ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_module, "now", clock)
    return clock


class Body:
    """A body in this process, whose lease is renewed as the test says."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.store, self.events = clock, FakeStore(clock), Events()
        self.renewal = BodyRenewal(self.store, self.store, self.events, clock)  # type: ignore[arg-type]
        request = LeaseSpec("b:{x}", "d", "t", TTL, "task", "n", os.getpid(), stoppable=True)
        self.state = LeaseState(request)
        self.state.granted(clock(), self.store.acquire(request).fence, self.renewal.verify)
        self.state.interrupt = self.interrupt = Fired()
        self.lease = Lease(request.lock, self.state)

    def replace(self) -> None:
        """Let a message wait that replaces the holder."""
        place = Place("ticket", 0.0, 1, True, 1.0, 40.0, "message", stop=True)
        self.store.acquire(LeaseSpec("b:{x}", "d", "other", TTL, "newcomer", place=place))

    def renew(self) -> RenewResult:
        [result] = self.store.renew([self.state.spec], 1.0)
        self.renewal.answered(self.state, result, self.clock())
        return result


@pytest.fixture
def body(clock: Clock) -> Body:
    return Body(clock)


def test_renewed_each_second(body: Body, clock: Clock) -> None:
    """A lease that can be replaced is renewed each second, also after a failure; another one each third of its TTL."""
    assert body.state.due == clock() + 1.0
    body.renew()
    assert body.state.due == clock() + 1.0
    body.renewal.failed([body.state], StoreUnavailable("unreachable"), clock())
    assert body.state.due == clock() + 1.0
    body.state.spec.stoppable = False
    body.renew()
    assert body.state.due == clock() + TTL / 3


def test_stopped_once(body: Body, clock: Clock) -> None:
    """A holder that is asked to stop learns it once: `held` is false for good, the body is interrupted; the lease lives on."""
    body.replace()
    for _ in range(3):
        clock.advance(1.0)
        assert body.renew() is RenewResult.STOP
        assert not body.lease.held
    assert (1, ["t"]) == (body.interrupt.times, body.events.of("replaced"))
    assert (clock() + TTL, True) == (body.state.deadline, body.state.is_active(clock()))
    with pytest.raises(LockLost):
        body.lease.ensure()
    assert body.state.is_stopped_by(LockLost(body.lease.key))
    assert body.state.is_stopped_by(LockLost())
    assert not body.state.is_stopped_by(LockLost("another"))


def test_ensure_asks_the_store(body: Body, clock: Clock) -> None:
    """A body that asks past its deadline learns there that it is to stop."""
    body.replace()
    clock.advance(TTL)
    body.store.acquire(body.state.spec)
    body.replace()
    with pytest.raises(LockLost):
        body.lease.ensure()
    assert body.state.stopped
    assert not body.state.lost


def test_lost_after_it_was_asked(body: Body) -> None:
    """A body is interrupted once, also if it loses its lease after it was asked to stop; then that is no loss of its own."""
    body.replace()
    body.renew()
    body.store.lose()
    body.renewal._mark_lost(body.state)
    assert (1, []) == (body.interrupt.times, body.events.of("lost"))
    assert body.state.lost


def test_asked_after_it_was_lost(body: Body, clock: Clock) -> None:
    """A lease that was lost before is not said to be replaced."""
    body.renewal._mark_lost(body.state)
    body.replace()
    body.renew()
    assert (1, [], False) == (body.interrupt.times, body.events.of("replaced"), body.state.stopped)


def test_asked_after_the_end(body: Body) -> None:
    """A body that has ended is not interrupted."""
    body.replace()
    body.state.ended = True
    body.renew()
    assert (0, []) == (body.interrupt.times, body.events.of("replaced"))


# -- the end ---------------------------------------------------------------------------------------


@pytest.fixture
def stopped(app: Celery, singleton: Singleton) -> Callable[..., Any]:
    """Return a function that delivers a task whose body is asked to stop, and ends as the test says."""
    names = itertools.count()

    def run(end: Callable[[Any], Any], **options: Any) -> Any:
        app.backend.client.cache.clear()  # all apps of a process share the results in memory

        @singleton(name=f"task-{next(names)}", on_duplicate="replace", bind=True, **options)
        def task(self: Any) -> Any:
            state = self.lease._state
            context_of(app).body_renewal.answered(state, RenewResult.STOP, 0.0)
            return end(self)

        deliver(task)
        return task

    return run


def test_end_with_lock_lost(stopped: Callable[..., Any]) -> None:
    """A body that ends with `LockLost` because it is replaced is stored as REVOKED, and its lock is free."""
    task = stopped(lambda self: self.lease.ensure())
    assert "REVOKED" == task.AsyncResult("id-1").state
    assert task.lock_holder() is None


def test_other_ends(stopped: Callable[..., Any]) -> None:
    """A body that returns ends as it ends, and so does one with an error of its own, such as the `LockLost` of another task."""
    assert "there" == stopped(lambda self: "there").AsyncResult("id-1").result

    def fail(self: Any) -> None:
        raise LockLost("another")

    task = stopped(fail)
    assert "FAILURE" == task.AsyncResult("id-1").state


def test_retry_of_a_replaced_task(stopped: Callable[..., Any]) -> None:
    """A body that gives its `LockLost` to `retry()` is not retried; another error is."""

    def retry(self: Any) -> None:
        try:
            self.lease.ensure()
        except LockLost as error:
            raise self.retry(exc=error) from error

    assert "REVOKED" == stopped(retry, max_retries=3).AsyncResult("id-1").state
    task = stopped(lambda self: self.retry(exc=ValueError()), max_retries=3)
    assert "RETRY" == task.AsyncResult("id-1").state


def test_reason_without_a_store(singleton: Singleton, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason does not name the replacement if the store cannot tell it."""

    @singleton(name="x", on_duplicate="replace")
    def task() -> None:
        pytest.fail("must not run")

    store, config = context_of(task.app).store, config_for(task)
    spec = LeaseSpec(config.base, config.digest((), {}), "t", TTL, "id-1")
    attempt = attempt_with(task, Context(id="id-1"), spec)
    with pytest.raises(Ignore, match=r"^replaced$"):
        replaced.end_replaced(attempt)
    store.acquire(LeaseSpec(config.base, config.digest((), {}), "other", TTL, "id-2"))
    with pytest.raises(Ignore, match="by task id-2"):
        replaced.end_replaced(attempt)
    with pytest.raises(Ignore, match="by task id-3"):  # which has ended
        replaced.end_replaced(attempt, "id-3")

    def fail(*_: Any) -> None:
        raise StoreUnavailable("unreachable")

    monkeypatch.setattr(store, "holder", fail)
    with pytest.raises(Ignore, match=r"^replaced$"):
        replaced.end_replaced(attempt)


@pytest.mark.parametrize(("stored", "state"), [("FAILURE", "FAILURE"), ("STARTED", "REVOKED")])
def test_redelivery_of_a_replaced_message(singleton: Singleton, stored: str, state: str) -> None:
    """A redelivery of a replaced message stores REVOKED only if its first delivery has stored no end."""

    @singleton(name="x", on_duplicate="replace")
    def task() -> None:
        pytest.fail("must not run")

    config = config_for(task)
    spec = LeaseSpec(config.base, config.digest((), {}), "t", TTL, "id-1")
    task.backend.store_result("id-1", None, stored)
    with pytest.raises(Ignore):
        replaced.drop_replaced(attempt_with(task, Context(id="id-1"), spec))
    assert state == task.AsyncResult("id-1").state


class Control:
    """The remote control of an app whose worker answers something, or that has no broker."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.sent: list[tuple[Any, ...]] = []

    def broadcast(self, command: str, arguments: dict[str, str], nodes: list[str], **options: Any) -> Any:
        self.sent.append((command, arguments, nodes))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        ([{"node@host": {"ok": "id-1"}}], []),
        ([{"node@host": {"error": "the pool cannot terminate tasks"}}], ["cannot terminate"]),
        ([], ["did not answer"]),  # the worker of a solo pool answers once the body is over
        (OSError("no broker"), ["could not have"]),
    ],
)
def test_terminate(singleton: Singleton, caplog: pytest.LogCaptureFixture, answer: Any, logged: list[str]) -> None:
    """The holder's own worker is told to terminate it, for whom; a pool that cannot, or a broker that fails, does no harm."""

    @singleton(name="x", on_duplicate="replace")
    def task() -> None:
        pytest.fail("must not run")

    task.app.control = control = Control(answer)
    attempt = attempt_with(task, Context(id="id-2"), LeaseSpec("base", "digest", "token", 30.0))
    with caplog.at_level("WARNING", "celery_singleton_lock"):
        terminate(attempt, HOLDER)
    assert [("singleton_replace", {"task_id": "id-1", "replacement": "id-2"}, ["node@host"])] == control.sent
    first, *others = [record.getMessage() for record in caplog.records]
    assert "has task id-1" in first
    assert len(logged) == len(others)
    assert all(text in line for text, line in zip(logged, others, strict=True))


def test_record_of_an_end_with_another_lock_lost(stopped: Callable[..., Any], app: Celery) -> None:
    """A body that is to stop, and fails with `LockLost` of another lock, is recorded as failed, as it is stored."""
    records: list[RunRecord] = []

    def end(task: Any) -> None:
        state = task.lease._state
        release = context_of(app).store.release

        def note(spec: LeaseSpec, *more: Any, **named: Any) -> Any:
            records.append(spec.record)
            return release(spec, *more, **named)

        context_of(app).store.release = note
        assert state.stopped
        raise LockLost("another")

    assert "FAILURE" == stopped(end).AsyncResult("id-1").state
    assert "failure" == records[0].outcome
