"""A redelivery that a process takes up only when its first delivery has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.overlap.test_handover import lose_connections


@pytest.mark.parametrize(("deduplicates", "runs"), [(False, 2), (True, 1)])
def test_busy_worker(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], deduplicates: bool, runs: int
) -> None:
    """It runs again, as in Celery alone, unless the worker drops what has succeeded (a setting of Celery)."""
    conf = {"worker_deduplicate_successful_tasks": deduplicates}
    node = fresh_worker(WorkerSpec("prefork", 1, conf=conf))
    result = env.hold("late", queue=node.worker_queue)
    lose_connections(env, node)
    node.wait_for_lines("received", result.id, count=2)
    env.let_go()
    assert "held" == env.get(result)
    env.get(env.job("late").apply_async((env.other_tag("next"),), queue=node.worker_queue))
    assert runs == len(env.starts())
