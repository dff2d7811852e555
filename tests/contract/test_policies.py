"""Each policy does the same to a duplicate at both moments, its publish and its start: state, log, signal and counter."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, uuid

from celery_singleton_lock import Debounce, DuplicateTask, Holder, Policy, SingletonTask, locks
from celery_singleton_lock.context import context_of
from celery_singleton_lock.policies import NAMED, name_of
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Fail, Follow, RunLater, SkipRun
from celery_singleton_lock.testing import locked
from tests.servers import RedisServer
from tests.unit.test_task import deliver

POLICIES = [*NAMED.values(), Debounce(5, 10)]
#: Kind of a decision -> the state that is stored, and the level of the log line.
ENDS: dict[type, tuple[str, int]] = {
    Fail: ("FAILURE", logging.WARNING),
    RunLater: ("RETRY", logging.INFO),
    Enqueue: ("PENDING", logging.INFO),
    Follow: ("PENDING", logging.INFO),
}


def end_of(decision: Decision) -> tuple[str, int]:
    return ("SUCCESS", decision.level) if isinstance(decision, SkipRun) else ENDS[type(decision)]


@pytest.fixture
def app(redis_server: RedisServer) -> Iterator[Celery]:
    """An app with a store that counts, and with results that each process can read."""
    app = Celery("policies", set_as_current=False, broker="memory://", backend=redis_server.url())
    prefix = f"policies-{secrets.token_hex(4)}"
    app.conf.update(singleton_lock_url=redis_server.url(), singleton_lock_prefix=prefix)
    yield app
    context_of(app).end()
    app.close()


def task_of(app: Celery, policy: Policy, **options: Any) -> Any:
    @app.task(shared=False, name="x", base=SingletonTask, on_duplicate=policy, **options)
    def task() -> None:
        pytest.fail("must not run")

    app.finalize()
    return task


def check(task: Any, sent: list[dict[str, Any]], holder: Holder, task_id: str) -> None:
    """Check that a duplicate was counted once for its policy, and that one signal tells of it."""
    policy = task.on_duplicate
    (signal,) = sent
    assert (policy, task_id, task.lock_key_for()) == (signal["policy"], signal["task_id"], signal["key"])
    assert holder.task_id == signal["holder"].task_id
    counters = locks.stats(task.app, "x")[0].counters
    assert {f"duplicates:{name_of(policy)}": 1} == {n: v for n, v in counters.items() if n.startswith("duplicates:")}


def check_start(
    task: Any, sent: list[dict[str, Any]], log: pytest.LogCaptureFixture, holder: Holder, task_id: str
) -> None:
    """Start a duplicate, and check that it ends as its policy decides."""
    log.clear()
    deliver(task, task_id=task_id)
    state, level = end_of(task.on_duplicate.decide(Duplicate(holder)))
    assert state == task.AsyncResult(task_id).state
    lines = [
        record for record in log.records if record.name == "celery_singleton_lock" and task_id in record.getMessage()
    ]
    assert [level] == [record.levelno for record in lines if record.levelno > logging.DEBUG]
    check(task, sent, holder, task_id)


@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
def test_start(app: Celery, sent: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, policy: Policy) -> None:
    """A duplicate that starts ends in the state of its policy's decision, with one line in the log."""
    caplog.set_level(logging.INFO, "celery_singleton_lock")
    task = task_of(app, policy)
    with locked(task) as holder:
        check_start(task, sent, caplog, holder, uuid())


@pytest.mark.parametrize("policy", [one for one in POLICIES if not isinstance(one, Debounce)], ids=name_of)
def test_publish(app: Celery, sent: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, policy: Policy) -> None:
    """A call that is skipped or fails is not published. Any other is, and its policy counts once it starts."""
    caplog.set_level(logging.INFO, "celery_singleton_lock")
    task = task_of(app, policy, lock_from="publish")
    with locked(task) as holder:
        decision = policy.decide(Duplicate(holder))
        if isinstance(decision, Fail):
            with pytest.raises(DuplicateTask) as error:
                task.delay()
            assert holder.task_id == error.value.holder.task_id
            check(task, sent, holder, sent[0]["task_id"])
            return
        result = task.delay()
        assert holder.task_id == result.duplicate.task_id
        if isinstance(decision, SkipRun):
            assert holder.task_id == result.id
            (line,) = (record for record in caplog.records if record.name == "celery_singleton_lock")
            assert (decision.level, True) == (line.levelno, "was not published" in line.getMessage())
            check(task, sent, holder, sent[0]["task_id"])
        else:
            assert [] == sent
            check_start(task, sent, caplog, holder, result.id)
