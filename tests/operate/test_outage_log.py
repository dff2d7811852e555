"""What workers log about an outage of their store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.proxy import Proxy
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import RedisServer, until

OURS = "celery_singleton_lock"


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    format_ = "[%(asctime)s: %(levelname)s/%(name)s] %(message)s"
    return {"singleton_lock_url": own_store.url(), "worker_log_format": format_}


@pytest.fixture
def store(own_store: RedisServer) -> Iterator[RedisServer]:
    yield own_store
    own_store.stop()
    own_store.start()


def lines(worker: LocalWorkerNode) -> list[str]:
    """Return the library's own lines but those of level DEBUG."""
    return [line for line in worker.lines(f"/{OURS}]") if ": DEBUG/" not in line]


@pytest.mark.parametrize("pool_name", ["prefork", "threads", "gevent"])
def test_outage_under_load(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], store: RedisServer, pool_name: str
) -> None:
    """In an outage, each process writes one WARNING when it begins and one line when it is over, however many messages come."""
    processes = 2 if pool_name == "prefork" else 1
    worker = fresh_worker(WorkerSpec(pool_name, 2))
    options = {"lock_options": {"lock_ttl": 6}}  # whose renewals do not fail under the load after the outage
    holder = env.job("skip_shortest").apply_async((env.tag, "hold"), queue=worker.worker_queue, **options)
    env.wait_for("start")
    before = len(lines(worker))
    store.stop()
    tags = [env.other_tag(str(number)) for number in range(60)]
    results = [env.job("store_retry").apply_async((tag,), queue=worker.worker_queue) for tag in tags]
    until(lambda: env.lock_signals(env.key("skip_shortest"), "lock_lost"), "the lease is lost")
    for result in results:
        env.wait_for_state(result, "RETRY")
    store.start()
    ends = worker.wait_for_lines("The store of locks answers again after", count=processes)
    assert ["done"] * len(results) == [env.get(result) for result in results]
    env.let_go()
    assert "held" == env.get(holder)
    begins = [line for line in lines(worker)[before:] if "The store of locks is unreachable" in line]
    assert processes == len(begins) == len(ends)
    lost = [line for line in lines(worker)[before:] if "lost its lock" in line or "reacquired its lock" in line]
    assert len(lost) <= 2
    assert 2 * processes + len(lost) == len(lines(worker)[before:]), lines(worker)[before:]
    (told,) = [end for end in ends if "leases lost: 1, of " in end]
    assert f"job.skip_shortest[{holder.id}] (nobody else had its lock)" in told
    assert sum(int(end.partition("; tasks postponed: ")[2].partition(",")[0]) for end in ends) >= len(results)


def test_who_ran_meanwhile(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], own_store: RedisServer
) -> None:
    """The line at the end says that another task had the lock of a lease that was lost."""
    key = env.key("skip_shortest")
    with Proxy(own_store.port) as proxy, env.store() as client:
        url = own_store.url().replace(str(own_store.port), str(proxy.port))
        worker = fresh_worker(WorkerSpec("threads", 2, conf={"singleton_lock_url": url}))
        holder = env.job("skip_shortest").apply_async((env.tag, "hold"), queue=worker.worker_queue)
        env.wait_for("start")
        proxy.hanging.set()
        until(lambda: env.lock_signals(key, "lock_lost") and not client.exists(key), "the lease is lost")
        client.hset(key, mapping={"token": "other", "task": "other", "node": "n", "pid": 1, "since": 0, "fence": 2**52})
        client.pexpire(key, 60_000)
        proxy.hanging.clear()
        (told,) = worker.wait_for_lines("The store of locks answers again after")
        assert f"job.skip_shortest[{holder.id}] (another task had its lock meanwhile)" in told
        env.let_go()
        assert "held" == env.get(holder)
