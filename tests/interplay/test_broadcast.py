"""A broadcast message is one delivery for each worker, and none of them makes more of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import pytest
from celery import Celery, states
from celery.result import AsyncResult
from kombu import Exchange
from pytest_celery import CeleryWorkerCluster

from celery_singleton_lock import DuplicateTask
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.interplay.worker_app import NEWS
from tests.servers import until

WORKERS = 3

#: Celery declares no broadcast queue when it publishes, and Redis takes an exchange that is not declared for a direct one.
TO_ALL: dict[str, Any] = {"queue": NEWS, "declare": [Exchange(NEWS, type="fanout")]}


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Where fanout exchanges live."""
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    """Each worker has the broadcast queue."""
    return {"test_broadcast": True}


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """Several workers, each of which can run more than one body."""
    return tuple(WorkerSpec("threads", concurrency=3, copy=number) for number in range(WORKERS))


@pytest.fixture(scope="module")
def celery_worker_cluster(celery_worker_cluster: CeleryWorkerCluster, celery_setup_app: Celery) -> CeleryWorkerCluster:
    """The workers, each of which has received a broadcast; one that says that it is ready may not have subscribed yet."""
    probe = f"probe-{secrets.token_hex(6)}"

    def all_receive() -> bool:
        celery_setup_app.tasks["job.plain"].apply_async((probe,), task_id=probe, ignore_result=True, **TO_ALL)
        return all(node.lines(f"[{probe}]", "received") for node in celery_worker_cluster)

    until(all_receive, "each worker receives broadcasts", every=0.2)
    return celery_worker_cluster


def lines(env: WorkerEnvironment, result: AsyncResult, words: str) -> int:
    """Return how many lines about a task have these words, in all logs."""
    return sum(len(node.lines(f"[{result.id}]", words)) for node in env.setup.worker_cluster)


def wait_for(env: WorkerEnvironment, result: AsyncResult, words: str, count: int) -> None:
    """Wait for so many lines in all logs."""
    until(lambda: lines(env, result, words) == count, f"{count} lines with {words}, for each of {WORKERS} workers")


@pytest.mark.parametrize("policy", ["skip", "retry", "raising"])
def test_one_message(env: WorkerEnvironment, policy: str) -> None:
    """One worker runs it; the others drop it, store nothing, and publish nothing."""
    holder = env.hold(policy, **TO_ALL)
    wait_for(env, holder, "dropped", WORKERS - 1)
    assert states.STARTED == holder.state
    env.let_go()
    assert "held" == env.get(holder)
    env.finish_node(env.worker.worker_queue)
    assert [holder.id] == [start["id"] for start in env.starts()]
    assert WORKERS == lines(env, holder, "received")


@pytest.mark.parametrize(
    ("policy", "words"), [("skip", "skipped"), ("retry", "skipped"), ("raising", "failed as a duplicate")]
)
def test_duplicate_of_another_message(env: WorkerEnvironment, policy: str, words: str) -> None:
    """Each worker decides once, by the policy, and skips where that would publish the message again."""
    holder = env.hold(policy, **TO_ALL)
    wait_for(env, holder, "dropped", WORKERS - 1)
    duplicate = env.job(policy).apply_async((env.tag,), **TO_ALL)
    wait_for(env, duplicate, words, WORKERS)
    if policy == "raising":
        assert isinstance(env.error(duplicate), DuplicateTask)
    else:
        assert env.get(duplicate) is None
    env.let_go()
    assert "held" == env.get(holder)
    assert WORKERS == lines(env, duplicate, "received")
    assert [holder.id] == [start["id"] for start in env.starts()]
