"""The store refuses a worker: from its start, or after it has served it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import states

from celery_singleton_lock import StoreError, StoreUnavailable
from tests.contract.conftest import certificate, start_with_tls
from tests.contract.test_answers import Case, cluster, make_case
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import RedisServer, until

__all__ = ["certificate", "cluster", "make_case"]  # fixtures

StartWorker = Callable[..., LocalWorkerNode]
TASKS = 12
REFUSED_NOW = "refuses this process now"


def change_password(server: RedisServer, old: str, new: str) -> None:
    """Change the password, and close all connections, as a failover does."""
    with redis.Redis.from_url(server.url(), password=old) as admin:
        admin.config_set("requirepass", new)
        admin.client_kill_filter(_type="normal", skipme=True)


@pytest.mark.parametrize("pool_name", ["prefork", "threads", "gevent"])
def test_password_that_changes(env: WorkerEnvironment, fresh_worker: StartWorker, pool_name: str) -> None:
    """While the login is refused that has worked, tasks are postponed and none fails, also in processes that have run none yet.

    Each process logs one ERROR. Once the login is accepted again, all tasks run.
    """
    with RedisServer("--requirepass", "right") as guarded:
        url = guarded.url().replace("//", "//:right@")
        worker = fresh_worker(WorkerSpec(pool_name, 4, conf={"singleton_lock_url": url}))
        job, queue = env.job("store_retry"), worker.worker_queue
        assert "done" == env.get(job.apply_async((env.other_tag("before"),), queue=queue))
        change_password(guarded, "right", "changed")
        tags = [env.other_tag(str(number)) for number in range(TASKS)]
        results = [job.apply_async((tag,), queue=queue) for tag in tags]
        for result in results:
            env.wait_for_state(result, states.RETRY)
        error = env.error(env.job("store_raise").apply_async((env.tag,), queue=queue))
        assert isinstance(error, StoreUnavailable)
        assert "wrong or missing password" in str(error)
        worker.wait_for_lines(": ERROR/", REFUSED_NOW)
        change_password(guarded, "changed", "right")
        assert ["done"] * TASKS == [env.get(result, 60) for result in results]
        said = worker.lines(": ERROR/", REFUSED_NOW)
        processes = {line.partition(": ERROR/")[2].partition("]")[0] for line in said}
        assert len(said) == len(processes) <= (5 if pool_name == "prefork" else 1), said
        assert "right" not in worker.logs().replace("MainProcess", "")


def test_permission_that_is_taken(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """A permission that has worked and is refused now is an outage, too."""
    with RedisServer() as server, redis.Redis.from_url(server.url()) as admin:
        admin.execute_command("ACL", "SETUSER", "locks", "on", ">right", "~*", "&*", "+@all")
        url = server.url().replace("//", "//locks:right@")
        worker = fresh_worker(WorkerSpec("prefork", 2, conf={"singleton_lock_url": url}))
        admin.execute_command("ACL", "SETUSER", "locks", "-hset")
        result = env.job("store_retry").apply_async((env.tag,), queue=worker.worker_queue)
        env.wait_for_state(result, states.RETRY)
        assert worker.wait_for_lines(": ERROR/", REFUSED_NOW)
        admin.execute_command("ACL", "SETUSER", "locks", "+hset")
        assert "done" == env.get(result)


@pytest.mark.parametrize("taken", ["-hset", "-pexpire"])
def test_permission_that_is_missing_from_the_start(fresh_worker: StartWorker, taken: str) -> None:
    """A login that may read and not write is told at the start, once."""
    with RedisServer() as server, redis.Redis.from_url(server.url()) as admin:
        admin.execute_command("ACL", "SETUSER", "locks", "on", ">right", "~*", "&*", "+@all", taken)
        url = server.url().replace("//", "//locks:right@")
        worker = fresh_worker(WorkerSpec("solo", 1, conf={"singleton_lock_url": url}))
        said = worker.wait_for_lines(": ERROR/", "The store of locks refuses this worker")
        assert len(said) == 1, said


def test_replica(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """A worker whose store is a replica says so in words at its start, and runs its tasks once that takes writes."""
    with RedisServer("--replicaof", "127.0.0.1 1") as replica:
        worker = fresh_worker(WorkerSpec("prefork", 2, conf={"singleton_lock_url": replica.url()}))
        said = worker.wait_for_lines(
            ": WARNING/", "The store of locks cannot be used now", "the URL is that of a replica"
        )
        assert len(said) == 1, said
        result = env.job("store_retry").apply_async((env.tag,), queue=worker.worker_queue)
        env.wait_for_state(result, states.RETRY)
        with redis.Redis.from_url(replica.url()) as admin:
            admin.execute_command("REPLICAOF", "NO", "ONE")
        assert "done" == env.get(result)


def test_node_of_a_cluster(cluster: tuple[Case, Case], fresh_worker: StartWorker) -> None:
    """A worker whose store is one node of a cluster says so in words at its start."""
    conf = {"singleton_lock_url": cluster[0].server.url()}
    worker = fresh_worker(WorkerSpec("solo", 1, conf=conf))
    said = worker.wait_for_lines(": ERROR/", "refuses this worker", "the store is a node of a Redis Cluster")
    assert len(said) == 1, said


def test_the_check_leaves_nothing(fresh_worker: StartWorker) -> None:
    """What the check at the start writes expires."""
    with RedisServer() as server, redis.Redis.from_url(server.url(), decode_responses=True) as client:
        fresh_worker(WorkerSpec("solo", 1, conf={"singleton_lock_url": server.url()}))
        until(lambda: client.exists("singleton:tasks"), "the worker has registered its tasks")
        until(lambda: ["singleton:tasks"] == client.keys(), "the other keys are gone", 20)


@pytest.mark.parametrize("pool_name", ["prefork", "threads"])
def test_certificate_of_a_stranger(
    env: WorkerEnvironment, fresh_worker: StartWorker, certificate: Any, pool_name: str
) -> None:
    """A server whose certificate nobody knows is refused in words at the start, and its tasks fail at once."""
    server, port = start_with_tls(certificate)
    try:
        conf = {"singleton_lock_url": f"rediss://localhost:{port}/0"}
        worker = fresh_worker(WorkerSpec(pool_name, 2, conf=conf))
        said = worker.wait_for_lines(": ERROR/", "refuses this worker", "no TLS connection to the store")
        assert len(said) == 1, said
        assert "certificate" in said[0].lower()
        error = env.error(env.job("store_retry").apply_async((env.tag,), queue=worker.worker_queue))
        assert type(error) is StoreError
    finally:
        server.close()
