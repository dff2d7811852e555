"""The number of a worker's connections to the store, under concurrent work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.servers import RedisServer, until

LIMIT = 2

#: Bodies that run concurrently.
BODIES = 8


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    """Return a store timeout that is longer than the store's pause, so that no connection is closed because of it."""
    return {
        "singleton_lock_url": own_store.url(),
        "singleton_lock_pool_limit": LIMIT,
        "singleton_lock_store_timeout": 100.0,
    }


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent", "eventlet"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    return [WorkerSpec(pool, concurrency=BODIES)]


class Connections:
    """The store connections of a worker's processes; ``most`` has the highest observed number by process id."""

    def __init__(self, worker: int, store: RedisServer) -> None:
        self.most: Counter[int] = Counter()
        self._worker, self._store = psutil.Process(worker), store

    def look(self) -> Counter[int]:
        for process in (self._worker, *self._worker.children(recursive=True)):
            ports = [found.raddr.port for found in process.net_connections("tcp") if found.raddr]
            self.most[process.pid] = max(self.most[process.pid], ports.count(self._store.port))
        return +self.most


def test_connections_are_bounded(env: WorkerEnvironment, pool: str, own_store: RedisServer) -> None:
    """A worker never has more connections than the limit, however many bodies end at the same time.

    Each prefork process has one, and a second one if it renews at that time.
    """
    tags = [env.other_tag(str(number)) for number in range(BODIES)]
    results = [env.job("skip_short").delay(tag, "hold") for tag in tags]
    processes = {env.wait_for("start", tag)["pid"] for tag in tags} | {env.worker.container.process.pid}
    fewest = dict.fromkeys(processes, 1 if pool == "prefork" else LIMIT)
    until(lambda: env.lock_signals(env.key("skip_short", tags[0]), "lock_renewed"), "renewed")
    connections = Connections(env.worker.container.process.pid, own_store)
    own_store.pause()  # all releases are in progress at the same time
    try:
        env.let_all_go()
        until(lambda: all(env.events("end", tag) for tag in tags), "all bodies are over")
        until(lambda: connections.look() >= Counter(fewest), "all connections")
    finally:
        own_store.resume()
    for result in results:
        assert "held" == env.get(result)
    assert processes == {*connections.look()}
    assert max(connections.most.values()) <= LIMIT
