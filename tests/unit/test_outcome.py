"""One place acts on the decisions of policies, also of those that users write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from kombu import Queue
from kombu.common import Broadcast

from celery_singleton_lock import DuplicateTask, Policy, RetryLater, Skip, signals
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, RunLater, SkipRun
from celery_singleton_lock.testing import hold
from celery_singleton_lock.worker.republish import RETRY_STATE_HEADER
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


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    """Collects what the signal `duplicate` is sent with."""
    seen: list[dict[str, Any]] = []

    def receive(**given: Any) -> None:
        seen.append(given)

    signals.duplicate.connect(receive)
    yield seen
    signals.duplicate.disconnect(receive)


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
    with hold(task):
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


def test_eager_run_cannot_run_later(singleton: Singleton) -> None:
    """The policy learns that an eager run cannot run later; where it decides for that, the run fails."""
    task, policy = decided(singleton, RunLater(7.0))
    with hold(task):
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

    with hold(task):
        assert "IGNORED" == deliver(task, **BROADCAST).info.state
    assert ("SUCCESS", None) == (task.AsyncResult("id-1").state, task.AsyncResult("id-1").result)
    assert [Skip()] == [signal["policy"] for signal in sent]
    assert not isinstance(policy, Chosen) or [False] == [duplicate.can_run_later for duplicate in policy.seen]
