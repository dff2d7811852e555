"""One place acts on the decisions of policies, also of those that users write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from kombu import Queue
from kombu.common import Broadcast

from celery_singleton_lock import DuplicateTask, Holder, Policy, Raise, RetryLater, RunOnceMore, Skip, Wait
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.properties import PROPERTY, Delivery
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.policies import name_of
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, RunLater, SkipRun
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec, Place
from celery_singleton_lock.testing import locked
from tests.unit.test_task import Singleton, deliver

BROADCAST = {"delivery_info": {"exchange": "all", "routing_key": ""}}


@dataclass(frozen=True)
class Chosen(Policy):
    """A user's policy, which notes what it is given."""

    decision: Decision
    seen: list[Duplicate]

    def decide(self, duplicate: Duplicate) -> Decision:
        self.seen.append(duplicate)
        return self.decision


@pytest.fixture(autouse=True)
def _forget_results(app: Celery) -> None:
    """All apps of a process share the results in memory."""
    app.backend.client.cache.clear()


def decided(singleton: Singleton, decision: Decision) -> tuple[Any, Chosen]:
    """Return a task whose policy always returns this decision, and the policy."""
    policy = Chosen(decision, [])

    @singleton(name="x", on_duplicate=policy)
    def task() -> None:
        pytest.fail("must not run")

    return task, policy


@pytest.mark.parametrize(
    ("decision", "state"), [(SkipRun("there"), "SUCCESS"), (RunLater(7.0), "RETRY"), (Fail(), "FAILURE")], ids=repr
)
def test_decision_of_a_users_policy(
    singleton: Singleton, sent: list[dict[str, Any]], decision: Decision, state: str
) -> None:
    """A decision takes effect whatever policy made it, and the signal is sent once with the holder and the policy."""
    task, policy = decided(singleton, decision)
    with locked(task):
        deliver(task, headers={RETRY_STATE_HEADER: {"times": 2, "waited": 15.0}})
    stored = task.AsyncResult("id-1")
    assert state == stored.state
    assert "there" == stored.result if state == "SUCCESS" else isinstance(stored.result, DuplicateTask)
    (duplicate,) = policy.seen
    assert ("held-by-test", 2, 15.0, True) == (
        duplicate.holder.task_id, duplicate.times, duplicate.waited, duplicate.can_run_later
    )  # fmt: skip
    (signal,) = sent
    assert (task.lock_key_for(), "id-1", duplicate.holder) == (signal["key"], signal["task_id"], signal["holder"])
    assert policy is signal["policy"]


@pytest.mark.parametrize("retries", [0, 2])
def test_policy_learns_of_an_own_retry(singleton: Singleton, retries: int) -> None:
    """A policy learns that a delivery is the task's own retry, also when its message was postponed since."""
    task, policy = decided(singleton, RunLater(7.0))
    with locked(task):
        for times in (0, 3):
            deliver(task, retries=retries, headers={RETRY_STATE_HEADER: {"times": times, "waited": 0.0}})
    assert [retries > 0] * 2 == [duplicate.own_retry for duplicate in policy.seen]


@pytest.mark.parametrize(
    ("policy", "retries", "state"),
    [
        (Skip("there"), 0, "SUCCESS"),
        (Skip("there"), 1, "RETRY"),
        (Skip("there", own_retries=True), 1, "SUCCESS"),
        (lambda task, holder: Skip("there"), 1, "RETRY"),
        ("raise", 1, "FAILURE"),
    ],
)
def test_own_retry_is_never_dropped(
    singleton: Singleton, caplog: pytest.LogCaptureFixture, policy: Any, retries: int, state: str
) -> None:
    """Under Skip a task's own retry waits, unless own retries are skipped too; under Raise it fails."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None:
        pytest.fail("must not run")

    with locked(task), caplog.at_level("INFO", "celery_singleton_lock"):
        deliver(task, retries=retries)
    assert state == task.AsyncResult("id-1").state
    assert (state == "RETRY") == any("waits" in record.getMessage() for record in caplog.records)


def test_own_retry_fails_after_max_wait(singleton: Singleton) -> None:
    """An own retry that has waited for the hour of RetryLater() fails as a duplicate."""

    @singleton(name="x")
    def task() -> None:
        pytest.fail("must not run")

    with locked(task):
        deliver(task, retries=1, headers={RETRY_STATE_HEADER: {"times": 90, "waited": 3600.0}})
    assert isinstance(task.AsyncResult("id-1").result, DuplicateTask)


def test_own_retry_in_an_eager_run_is_skipped(singleton: Singleton) -> None:
    """An eager run cannot wait, so its own retry is skipped as its first run would be."""

    @singleton(name="x", on_duplicate=Skip("there"))
    def task() -> None:
        pytest.fail("must not run")

    with locked(task):
        assert ("SUCCESS", "there") == ((result := task.apply(retries=1)).state, result.result)


def test_own_retry_of_a_broadcast_message_is_skipped(app: Celery, singleton: Singleton) -> None:
    """A broadcast message is never published again, so its own retry is skipped with the policy's result."""
    app.conf.task_queues, app.conf.task_default_queue = [Queue("celery"), Broadcast("all")], "celery"

    @singleton(name="x", on_duplicate=Skip("there"))
    def task() -> None:
        pytest.fail("must not run")

    with locked(task):
        assert "IGNORED" == deliver(task, retries=1, **BROADCAST).info.state
    assert ("SUCCESS", "there") == (task.AsyncResult("id-1").state, task.AsyncResult("id-1").result)


def test_eager_run_cannot_run_later(singleton: Singleton) -> None:
    """The policy learns that an eager run cannot run later; where it decides for that, the run fails."""
    task, policy = decided(singleton, RunLater(7.0))
    with locked(task):
        assert isinstance(task.apply().result, DuplicateTask)
    assert [False] == [duplicate.can_run_later for duplicate in policy.seen]


@pytest.mark.parametrize("chosen", [RunLater(7.0), RetryLater()], ids=["user", "ours"])
def test_broadcast_message_cannot_run_later(
    app: Celery, singleton: Singleton, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, chosen: Any
) -> None:
    """A broadcast message is skipped where its policy decides to run later, and the signal says so."""
    app.conf.task_queues, app.conf.task_default_queue = [Queue("celery"), Broadcast("all")], "celery"
    monkeypatch.setattr(app, "send_task", lambda *_, **__: pytest.fail("published"))
    policy = Chosen(chosen, []) if isinstance(chosen, RunLater) else chosen

    @singleton(name="x", on_duplicate=policy)
    def task() -> None:
        pytest.fail("must not run")

    with locked(task):
        assert "IGNORED" == deliver(task, **BROADCAST).info.state
    assert ("SUCCESS", None) == (task.AsyncResult("id-1").state, task.AsyncResult("id-1").result)
    assert [Skip()] == [signal["policy"] for signal in sent]
    assert not isinstance(policy, Chosen) or [False] == [duplicate.can_run_later for duplicate in policy.seen]


@pytest.mark.parametrize("policy", [RunOnceMore("latest"), "replace"], ids=["latest", "replace"])
@pytest.mark.parametrize("pending", ["newer", ""])
def test_superseded(
    singleton: Singleton,
    app: Celery,
    sent: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    policy: Any,
    pending: str,
) -> None:
    """A message whose place a newer one has taken is skipped: log and event name no holder, but the newer one if it waits."""
    caplog.set_level("INFO", "celery_singleton_lock")
    events: list[dict[str, Any]] = []

    @singleton(name="x", on_duplicate=policy)
    def task() -> None:
        pytest.fail("must not run")

    monkeypatch.setattr(task, "send_event", lambda kind, **fields: events.append(fields))
    config, store = config_for(task), context_of(app).store
    with locked(task):
        for name in ("older", "newer"):
            place = Place(name, room=1, replace=True, next_copy=1.0, due=60.0)
            spec = LeaseSpec(config.base, config.digest((), {}), name, 60.0, name, place=place)
            store.acquire(spec)
        if not pending:
            store.leave(spec, "newer")
        state = RetryState(ticket="older", copy=1.0)._asdict()
        deliver(
            task, task_id="older", properties={PROPERTY: Delivery(events=True)}, headers={RETRY_STATE_HEADER: state}
        )
    assert ("SUCCESS", None) == (app.AsyncResult("older").state, app.AsyncResult("older").result)
    assert [] == sent, "it was sent when the message joined the line"
    key = task.lock_key_for()
    assert [{"name": "x", "key": key, "holder": None, **({"pending": pending} if pending else {})}] == events
    (record,) = caplog.records
    by = "task newer" if pending else "a newer message"
    assert f"Task x[older] skipped, as {by} took its place in line; key {key}" == record.getMessage()
    assert (key, None) == (vars(record)["key"], vars(record)["holder"])


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (Holder("a", "node", 4711, 1.0, 2.0), "task a on node (pid 4711, for 1.0s, expires in 2.0s)"),
        (Holder("a", age=1.0, remaining=2.0, state="queued"), "task a (queued for 1.0s, expires in 2.0s)"),
        (Holder("a", state="queued"), "task a (queued)"),  # the first in line
        (Holder("a"), "task a"),  # whose result `Join` waits for
        (Holder(), "another task"),
    ],
)
def test_text_of_a_holder(holder: Holder, text: str) -> None:
    """A text about a duplicate tells of its holder what is known, and nothing else."""
    assert text == str(holder)


@pytest.mark.parametrize("policy", ["skip", "wait", "raise", "join"])
def test_released_before_the_start(
    singleton: Singleton, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """A message whose lock an operator releases between a late grant and its start comes again, under each policy."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None:
        pytest.fail("must not run")

    asked: list[LeaseSpec] = []

    def acquire(spec: LeaseSpec, timeout: float | None = None) -> AcquireResult:
        asked.append(spec)
        assert len(asked) < 5, "for ever"
        return AcquireResult(AcquireStatus.REVOKED)

    monkeypatch.setattr(context_of(task.app).store, "acquire", acquire)
    deliver(task)
    assert (1, "RETRY") == (len(asked), task.AsyncResult("id-1").state)
    assert "an operator released its lock before it began" in caplog.text


@pytest.mark.parametrize(
    ("policy", "state"),
    [(Wait(max_wait=10), "FAILURE"), (RetryLater(max_wait=10), "FAILURE"), (Skip(), "RETRY"), (Raise(), "RETRY")],
    ids=name_of,
)
def test_begun_message_that_has_waited_for_long(singleton: Singleton, policy: Policy, state: str) -> None:
    """A message whose work has begun fails past the bound of a policy that keeps duplicates; others never end it."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None:
        pytest.fail("must not run")

    with locked(task):
        deliver(task, headers={RETRY_STATE_HEADER: {"times": 2, "waited": 15.0, "is_unfinished": True}})
    assert state == task.AsyncResult("id-1").state
