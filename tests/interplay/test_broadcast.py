"""A broadcast message is one delivery for each worker, and none of them makes more of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery import states
from celery.result import AsyncResult
from kombu import Exchange

from celery_singleton_lock import DuplicateTask
from tests.integration.bench import Bench
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


def lines(bench: Bench, result: AsyncResult, words: str) -> int:
    """Return how many lines about a task have these words, in all logs."""
    return sum(len(node.lines(f"[{result.id}]", words)) for node in bench.setup.worker_cluster)


def wait_for(bench: Bench, result: AsyncResult, words: str, count: int) -> None:
    """Wait for so many lines in all logs."""
    until(lambda: lines(bench, result, words) == count, f"{count} lines with {words}, for each of {WORKERS} workers")


@pytest.mark.parametrize("policy", ["skip", "retry", "raising"])
def test_one_message(bench: Bench, policy: str) -> None:
    """One worker runs it; the others drop it, store nothing, and publish nothing."""
    holder = bench.hold(policy, **TO_ALL)
    wait_for(bench, holder, "dropped", WORKERS - 1)
    assert states.STARTED == holder.state
    bench.let_go()
    assert "held" == bench.get(holder)
    bench.settle_node(bench.worker.worker_queue)
    assert [holder.id] == [start["id"] for start in bench.starts()]
    assert WORKERS == lines(bench, holder, "received")


@pytest.mark.parametrize(("policy", "words"), [("skip", "skipped"), ("retry", "skipped"), ("raising", "refused")])
def test_duplicate_of_another_message(bench: Bench, policy: str, words: str) -> None:
    """Each worker decides once, by the policy, and skips where that would publish the message again."""
    holder = bench.hold(policy, **TO_ALL)
    wait_for(bench, holder, "dropped", WORKERS - 1)
    duplicate = bench.job(policy).apply_async((bench.tag,), **TO_ALL)
    wait_for(bench, duplicate, words, WORKERS)
    if policy == "raising":
        assert isinstance(bench.error(duplicate), DuplicateTask)
    else:
        assert bench.get(duplicate) is None
    bench.let_go()
    assert "held" == bench.get(holder)
    assert WORKERS == lines(bench, duplicate, "received")
    assert [holder.id] == [start["id"] for start in bench.starts()]
