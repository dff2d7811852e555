"""The store commands of a task: two when it runs, one when it is a duplicate, and no new connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import redis

from tests.integration.environment import WorkerEnvironment
from tests.integration.monitor import Monitor
from tests.integration.nodes import WorkerSpec
from tests.servers import RedisServer, until

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """One child, so that a warmed-up worker is warm altogether.

    Elsewhere one at a time would do too, but then Celery may look for the next message after 2 s only.
    """
    return [WorkerSpec(pool, concurrency=1 if pool in ("prefork", "solo") else 4) for pool in POOLS]


@pytest.fixture(params=POOLS)
def queue(request: pytest.FixtureRequest, env: WorkerEnvironment) -> str:
    """Return the queue of a worker that has already run each of these tasks."""
    queue = str(env.worker_of(request.param).worker_queue)
    for name in ("skip", "raising", "retry", "long"):
        env.get(env.job(name).apply_async((env.other_tag("warm"),), queue=queue))
    return queue


def elsewhere(env: WorkerEnvironment, queue: str) -> str:
    """Return the queue of a worker other than that of ``queue``, warmed up too."""
    nodes = (node for node in env.setup.worker_cluster if node.worker_queue != queue)
    other = str(next(nodes).worker_queue)
    env.get(env.job("long").apply_async((env.other_tag("warm"),), queue=other))
    return other


def test_a_run_costs_two_commands(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """A run sends acquire and release, and nothing else, whether it succeeds or fails."""
    with Monitor(own_store.url()) as monitor:
        env.get(env.job("long").apply_async((env.tag,), queue=queue))
        env.finish_node(queue)
    assert (2, 0) == (len(monitor.commands), monitor.connections), monitor.commands
    with Monitor(own_store.url()) as monitor:
        env.error(env.job("long").apply_async((env.tag, "raise"), queue=queue))
        env.finish_node(queue)
    assert (2, 0) == (len(monitor.commands), monitor.connections), monitor.commands


@pytest.mark.parametrize("name", ["long", "raising", "impatient"], ids=["skip", "raise", "retry"])
def test_a_duplicate_costs_one_command(env: WorkerEnvironment, queue: str, own_store: RedisServer, name: str) -> None:
    """A duplicate sends one refused acquire for each delivery; the answer includes the holder."""
    env.hold(name, queue=elsewhere(env, queue))
    with Monitor(own_store.url()) as monitor:
        env.job(name).apply_async((env.tag,), queue=queue).get(timeout=20, propagate=False)
        env.finish_node(queue)
    deliveries = len(env.lock_signals(env.key(name), "duplicate"))
    assert (deliveries, 0) == (len(monitor.commands), monitor.connections), monitor.commands
    assert deliveries > 1 if name == "impatient" else deliveries == 1


@pytest.mark.parametrize("name", ["throttled", "once", "tried", "capped"])
def test_options_cost_no_command(env: WorkerEnvironment, queue: str, own_store: RedisServer, name: str) -> None:
    """A hold, counted starts and a cap cost no command more; a duplicate of a hold costs one."""
    job = env.job(name)
    env.get(job.apply_async((env.other_tag("warm"),), queue=queue))
    with Monitor(own_store.url()) as monitor:
        env.get(job.apply_async((env.tag,), queue=queue))
        env.finish_node(queue)
    assert (2, 0) == (len(monitor.commands), monitor.connections), monitor.commands
    if name == "throttled":
        with Monitor(own_store.url()) as monitor:
            assert env.get(job.apply_async((env.tag,), queue=queue)) is None
            env.finish_node(queue)
        assert (1, 0) == (len(monitor.commands), monitor.connections), monitor.commands


def test_an_idle_worker_costs_nothing(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """A worker without leases sends no commands, and plain tasks send none."""
    with Monitor(own_store.url()) as monitor:
        plain = env.job("plain").apply_async((env.tag, "sleep", 1.0), queue=queue)
        assert "slept" == env.get(plain)
    assert ([], 0) == (monitor.commands, monitor.connections)


def test_nothing_stays_behind(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """All keys that remain after many different signatures expire, except the last fence of each task name."""
    results = [env.job("skip").apply_async((env.other_tag(str(number)),), queue=queue) for number in range(50)]
    for result in results:
        env.get(result)
    client = redis.Redis.from_url(own_store.url())
    until(lambda: not list(client.scan_iter("*:lock:*")), "no lock is left")
    assert [] == [key for key in client.scan_iter("*") if client.ttl(key) == -1 and not key.endswith(b":fence")]
    client.close()
