"""Every kind of duplicate, at every kind of broker, in every pool that runs more than one body at once; greenlets at night."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.environment import WorkerEnvironment
from tests.interplay.cases import CASES
from tests.interplay.conftest import HAS_QUORUM_QUEUES, own_conf
from tests.servers import RedisServer

ALL_POOLS = ("prefork", "threads", "gevent", "eventlet")
TWO_POOLS = ("prefork", "threads")

#: A kind of broker, other configuration of it, and the pools.
BROKERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "redis": ("redis", {}, ALL_POOLS),
    "rabbitmq": ("rabbitmq", {}, ALL_POOLS),
    **({"quorum": ("quorum", {}, ALL_POOLS)} if HAS_QUORUM_QUEUES else {}),
    "redis topic": ("redis", {"test_topic": True}, TWO_POOLS),
    "rabbitmq topic": ("rabbitmq", {"test_topic": True}, TWO_POOLS),
    "filesystem": ("filesystem", {}, TWO_POOLS),
    "sqlite": ("sqlite", {}, TWO_POOLS),
}
COMBINATIONS = [
    pytest.param((name, pool), marks=[] if pool in TWO_POOLS else pytest.mark.nightly)
    for name, (_, _, pools) in BROKERS.items()
    for pool in pools
]


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def combination(request: pytest.FixtureRequest) -> Any:
    """A kind of broker and a pool."""
    return request.param


@pytest.fixture(scope="module")
def broker_kind(combination: tuple[str, str]) -> str:
    """The server."""
    return BROKERS[combination[0]][0]


@pytest.fixture(scope="module")
def pool(combination: tuple[str, str]) -> str:
    """The pool."""
    return combination[1]


@pytest.fixture(scope="module")
def extra_conf(
    request: pytest.FixtureRequest, combination: tuple[str, str], redis_server: RedisServer
) -> dict[str, Any]:
    """How the broker is used; where it is no Redis, locks are kept in one."""
    kind, conf, _ = BROKERS[combination[0]]
    server = request.getfixturevalue(f"{kind}_server")
    return {"singleton_lock_url": redis_server.url(db=3), **own_conf(kind, server), **conf}


@pytest.mark.parametrize("case", CASES)
def test_duplicate(env: WorkerEnvironment, case: str) -> None:
    """As `tests.interplay.cases` says of it."""
    CASES[case](env)
