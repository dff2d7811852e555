"""A grace period: a store that may have lost locks grants none for a TTL, while living holders reacquire theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock.store.keys import LINE_TOKEN, queued_token
from celery_singleton_lock.store.protocol import AcquireStatus, GracePeriod, RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec, Place
from tests.contract.conftest import KINDS, VALKEY
from tests.servers import RedisServer, until

MakeRequest = Callable[..., LeaseSpec]
TTL = 2.0


@pytest.fixture(params=KINDS[1:])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., RedisServer]]:
    """Yield a function that starts servers of each kind."""
    started = []

    def begin(*options: str) -> RedisServer:
        program = str(VALKEY) if request.param == "valkey" else ""
        started.append(RedisServer(*options, program=program))
        return started[-1].start()

    yield begin
    for server in started:
        server.close()


@pytest.fixture
def server(start: Callable[..., RedisServer]) -> RedisServer:
    return start()


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    made = grace_store(server)
    yield made
    made.close()


def grace_store(server: RedisServer) -> RedisStore:
    return RedisStore(connector(server.url(), {}), 5.0, None, 5, grace=True)


def in_grace(store: RedisStore, spec: LeaseSpec) -> float:
    """Return how long the store grants this lock to nobody."""
    with pytest.raises(GracePeriod) as caught:
        store.acquire(spec)
    return caught.value.left


def get(store: RedisStore, spec: LeaseSpec) -> None:
    """Acquire a lock once the grace period is over."""

    def granted() -> bool:
        try:
            return store.acquire(spec).status is AcquireStatus.GRANTED
        except GracePeriod as error:
            time.sleep(error.left)
            return False

    until(granted, "granted")


def know(store: RedisStore, spec: LeaseSpec) -> None:
    """Have the server know the task name for an hour."""
    in_grace(store, spec)
    store.command("HINCRBY", f"{spec.base}:primary", "since", "-3600000")


def test_first_run_of_a_task_name(store: RedisStore, lease_request: MakeRequest) -> None:
    """A task name that the store does not know waits once, for the TTL of its request; others wait on their own."""
    begun = time.monotonic()
    first, other = lease_request(ttl=TTL), lease_request("e", ttl=TTL)
    assert TTL - 0.5 < in_grace(store, first) <= TTL
    assert 0 < in_grace(store, other) <= TTL
    get(store, first)
    assert time.monotonic() - begun >= TTL
    assert AcquireStatus.GRANTED is store.acquire(other).status
    assert TTL - 0.5 < in_grace(store, replace(first, base="contract:{another}")) <= TTL


def test_lost_data(server: RedisServer, store: RedisStore, lease_request: MakeRequest) -> None:
    """After FLUSHALL a living holder reacquires its lock, and neither a duplicate nor another lock key of the task is granted."""
    held, duplicate, free = lease_request(ttl=60.0), lease_request(ttl=TTL), lease_request("free", ttl=TTL)
    know(store, held)
    fence = store.acquire(held).fence
    with Redis(port=server.port) as client:
        client.flushall()
    assert 0 < in_grace(store, duplicate) <= TTL
    assert 0 < in_grace(store, free) <= TTL
    assert [RenewResult.MISSING] == store.renew([held])
    assert (RenewResult.RENEWED, True) == store.reacquire(held, fence)
    assert AcquireStatus.REFUSED is store.acquire(duplicate).status
    get(store, free)
    store.release(held, True)
    get(store, duplicate)


def test_restart(server: RedisServer, store: RedisStore, lease_request: MakeRequest) -> None:
    """A server that has restarted grants nothing for a TTL, as its last writes may be missing."""
    know(store, lease_request())
    assert AcquireStatus.GRANTED is store.acquire(lease_request("before")).status
    with Redis(port=server.port) as client:
        client.config_set("save", "3600 1")
        client.save()
    server.stop()
    server.start()
    assert 0 < in_grace(store, lease_request(ttl=TTL)) <= TTL


def test_promoted_replica(
    start: Callable[..., RedisServer], server: RedisServer, store: RedisStore, lease_request: MakeRequest
) -> None:
    """A replica that became the primary grants nothing for a TTL; what it has is renewed, and met by duplicates."""
    held = lease_request(ttl=60.0)
    know(store, held)
    store.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    replica = start("--replicaof", "127.0.0.1", str(server.port))
    store.acquire(held)
    moved = grace_store(replica)
    until(lambda: moved.holder(held.lock), "the replica has it")
    with Redis(port=replica.port) as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    assert [RenewResult.RENEWED] == moved.renew([held])
    assert AcquireStatus.REFUSED is moved.acquire(lease_request()).status
    assert 0 < in_grace(moved, lease_request("other", ttl=TTL)) <= TTL
    moved.close()
    assert AcquireStatus.GRANTED is store.acquire(lease_request("other")).status  # of the old one: see `replicas`


def test_reservations_wait_for_the_ttl_of_the_lock(store: RedisStore, lease_request: MakeRequest) -> None:
    """A reservation, which may last for an hour, waits no longer than a lease."""
    spec = lease_request(task_id="a", token=queued_token("a"), queued=True, ttl=3600.0, grace=TTL)
    assert TTL - 0.5 < in_grace(store, spec) <= TTL
    get(store, spec)


def test_each_request_waits_for_its_own_ttl(store: RedisStore, lease_request: MakeRequest) -> None:
    """A request with a short TTL waits for that long, while one with a long TTL still waits."""
    get(store, lease_request(ttl=0.5))
    assert 30.0 < in_grace(store, lease_request("long", ttl=60.0)) <= 59.5


@pytest.mark.parametrize("kind", ["reservation", "line", "copy", "limit"])
def test_features(server: RedisServer, store: RedisStore, lease_request: MakeRequest, kind: str) -> None:
    """It covers locks that are acquired at publish, lines, and limits; a reservation that is there is taken up at once."""
    know(store, lease_request())
    spec = {
        "reservation": lease_request(task_id="a", token=queued_token("a"), queued=True),
        "line": lease_request(place=Place("", room=5)),
        "copy": lease_request(token=LINE_TOKEN, queued=True, place=Place("t", 1.0)),
        "limit": lease_request(limit=3),
    }[kind]
    if kind == "reservation":
        assert AcquireStatus.GRANTED is store.acquire(spec).status
        store.command("HSET", f"{spec.base}:primary", "id", "another")
        assert AcquireStatus.GRANTED is store.acquire(lease_request(task_id="a")).status
        spec = replace(spec, digest="e")
    with Redis(port=server.port) as client:
        client.flushall()
    assert 0 < in_grace(store, replace(spec, ttl=TTL)) <= TTL
    with Redis(port=server.port) as client:
        assert [f"{spec.base}:primary".encode()] == client.keys("*")


def test_clock_that_is_set_back(server: RedisServer, store: RedisStore, lease_request: MakeRequest) -> None:
    """A server whose clock is set back by an hour grants nothing for a TTL, and not for an hour."""
    know(store, lease_request())
    with Redis(port=server.port) as client:
        client.hincrby(f"{lease_request().base}:primary", "since", 3_600_000)
    assert TTL - 0.5 < in_grace(store, lease_request(ttl=TTL)) <= TTL


def test_paused(store: RedisStore, lease_request: MakeRequest) -> None:
    """A task that an operator has paused is told so."""
    store.records().pause(lease_request().base, "*", 60.0, "me", "why")
    result: Any = store.acquire(lease_request())
    assert "paused" == result.holder.state
