"""Quorum queues, and classic ones, lose no message, whatever becomes of connection and child."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import celery
import pytest

from tests.faults.proxy import Proxy
from tests.integration.environment import WorkerEnvironment
from tests.interplay.conftest import HAS_QUORUM_QUEUES, QUORUM
from tests.servers import RabbitMQServer, RedisServer

#: After a reconnect a prefork worker of an older Celery starts no body, of plain tasks neither, before one that runs has ended.
STARTS_AFTER_RECONNECT = celery.VERSION >= (5, 7)
ENDS = ["killed", *(["returned"] if STARTS_AFTER_RECONNECT else [])]
QUEUES = ["classic", *(["quorum"] if HAS_QUORUM_QUEUES else [])]


@pytest.fixture(scope="module")
def broker_kind() -> str:
    """The server."""
    return "rabbitmq"


@pytest.fixture(scope="module")
def proxy(rabbitmq_server: RabbitMQServer) -> Iterator[Proxy]:
    """All connections to the broker go through it."""
    with Proxy(rabbitmq_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module", params=QUEUES)
def extra_conf(request: pytest.FixtureRequest, proxy: Proxy, redis_server: RedisServer) -> dict[str, Any]:
    """Quorum queues, and classic ones beside them."""
    url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
    return {
        "broker_url": url,
        "singleton_lock_url": redis_server.url(db=3),
        **(QUORUM if request.param == "quorum" else {}),
    }


@pytest.mark.parametrize("first_end", ENDS)
def test_connection_and_child_lost(env: WorkerEnvironment, proxy: Proxy, first_end: str) -> None:
    """A message whose connection is cut runs again if its child is killed, and not if its body ends."""
    result = env.hold("comes_back")
    proxy.cut()
    env.worker.wait_for_lines(f"[{result.id}]", "received", count=2)
    if STARTS_AFTER_RECONNECT:
        env.worker.wait_for_lines(f"[{result.id}]", "redelivered while another delivery", count=2)
    if first_end == "killed":
        env.kill_body(env.starts()[0])
    else:
        env.let_go()
    assert ("done" if first_end == "killed" else "held") == env.get(result)
    env.worker.wait_for_lines(f"[{result.id}]", "dropped" if first_end == "returned" else "succeeded")
    assert (2 if first_end == "killed" else 1) == len(env.starts())
