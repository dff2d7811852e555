"""What a worker does about its store when it starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_singleton_lock import StoreError, StoreUnavailable
from tests.integration.bench import Bench
from tests.integration.nodes import LocalWorkerNode, WorkerSpec, wait_for_end
from tests.servers import RedisServer, free_port


def test_without_a_store(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """No Redis anywhere in the configuration: the worker ends and names the setting."""
    conf = {"broker_url": "memory://", "result_backend": "cache+memory://"}
    worker = fresh_worker(WorkerSpec("solo", 1, conf={**conf, "singleton_lock_url": None}), ready=False)
    code = wait_for_end(worker.container, 20)
    assert code not in (None, 0)
    assert "ConfigurationError" in worker.logs()
    assert "singleton_lock_url" in worker.logs()


@pytest.mark.parametrize("pool_name", ["prefork", "threads", "gevent"])
def test_store_away(bench: Bench, fresh_worker: Callable[..., LocalWorkerNode], pool_name: str) -> None:
    """The worker starts, says once that the store is away, and recovers by itself."""
    with RedisServer() as later:
        later.port = free_port()
        conf = {"singleton_lock_url": later.url()}
        worker = fresh_worker(WorkerSpec(pool_name, 2, conf=conf))
        time.sleep(1.0)
        said = worker.wait_for_lines(": WARNING/", "store")
        assert len(said) == 1, said
        later.start()
        job = bench.job("store_retry")
        assert "done" == bench.get(job.apply_async((bench.tag,), queue=worker.worker_queue))


def test_eviction_policy(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A store that may drop locks when it is full gets one WARNING at start."""
    with RedisServer("--maxmemory-policy", "allkeys-lru") as careless:
        conf = {"singleton_lock_url": careless.url()}
        worker = fresh_worker(WorkerSpec("prefork", 2, conf=conf))
        said = worker.wait_for_lines(": WARNING/", "allkeys-lru")
        time.sleep(0.5)
        assert len(worker.lines(": WARNING/", "allkeys-lru")) == len(said) == 1


def test_sound_store(fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A store that is as it should be is not talked about."""
    worker = fresh_worker(WorkerSpec("prefork", 2))
    time.sleep(0.5)
    assert [] == worker.lines(": WARNING/")


def test_refused_login(bench: Bench, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A wrong password is no outage: the worker says so once and runs on, tasks fail under any setting, nobody is told it."""
    with RedisServer("--requirepass", "right") as guarded:
        url = f"redis://:wr0ngpass@127.0.0.1:{guarded.port}/0"
        worker = fresh_worker(WorkerSpec("prefork", 2, conf={"singleton_lock_url": url}))
        for name in ("store_run", "store_retry", "store_raise"):
            error = bench.error(bench.job(name).apply_async((bench.tag,), queue=worker.worker_queue))
            assert isinstance(error, StoreError)
            assert not isinstance(error, StoreUnavailable)
        assert [] == bench.starts()
        said = worker.wait_for_lines(": WARNING/", "The store of locks cannot be used for now")
        assert len(said) == 1, said
        assert "wr0ngpass" not in worker.logs()


@pytest.mark.parametrize("pool_name", ["prefork", "threads", "gevent"])
def test_copies_that_waited_for_a_worker(
    bench: Bench, fresh_worker: Callable[..., LocalWorkerNode], pool_name: str
) -> None:
    """Of many copies that were published while no worker was there one runs when there is one; the others are skipped."""
    queue = f"late-{bench.tag}"
    copies = [bench.job("skip_value").apply_async((bench.tag, "hold"), queue=queue) for _ in range(12)]
    fresh_worker(WorkerSpec(pool_name, 4, options=("--queues", queue)))
    holder = bench.wait_for("start")["id"]
    assert ["already"] * 11 == [bench.get(copy) for copy in copies if copy.id != holder]
    bench.let_go()
    assert ["held"] == [bench.get(copy) for copy in copies if copy.id == holder]
    assert 1 == len(bench.starts())
