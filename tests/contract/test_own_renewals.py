"""A store tells when the process of a body last renewed its lease: a supervisor renews also for a child that hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.redis.calls import ScriptCall
from celery_singleton_lock.store.redis.connection import Command
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec
from tests.contract.clocked import ClockedRedisStore
from tests.contract.conftest import MemoryBacking
from tests.servers import RedisServer

BEGIN, TTL = 1e9, 30.0
BASE = "renewed:{task}"


class _Store(ClockedRedisStore):
    def run_all(self, calls: Sequence[Command]) -> list[Any]:
        return [self.run(call) if isinstance(call, ScriptCall) else self.command(*call.texts) for call in calls]


class Timed:
    """A store whose clock the test advances."""

    def __init__(self, store: LockStore, set_time: Callable[[float], None]) -> None:
        self.store = store
        self._set_time, self._time = set_time, BEGIN

    def wait(self, seconds: float) -> None:
        self._time += seconds
        self._set_time(self._time)

    def told(self, lock: str) -> tuple[float | None, bool]:
        """Return when the process last renewed, and whether it may hang, as the store and its records tell."""
        holder = self.store.holder(lock)
        assert holder
        found = of(holder)
        if isinstance(self.store, ClockedRedisStore):
            (recorded,) = [one.holder for one in self.store.records().locks(BASE) if one.key == lock and one.exists]
            assert found == of(recorded)
        return found


def of(holder: Holder) -> tuple[float | None, bool]:
    return None if holder.renewed is None else round(holder.renewed, 2), holder.hung


@pytest.fixture(params=["memory", "redis"])
def timed(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Timed]:
    if request.param == "memory":
        memory = MemoryBacking(BEGIN)
        yield Timed(memory.store, memory.set_time)
        return
    store = _Store(redis_server.url(), BEGIN, history=5)
    yield Timed(store, store.set_time)
    store.close()


def lease(digest: str = "d", limit: int = 0) -> LeaseSpec:
    return LeaseSpec(BASE, digest, f"token-{digest}", TTL, "id", "w1@host", 4711, supervised=True, limit=limit)


def supervisors(limit: int = 0) -> LeaseSpec:
    return LeaseSpec(BASE, "", "token-d", TTL, "id", "w1@host", 4711, supervised=True, limit=limit)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_supervisor_alone_renews(timed: Timed, limit: int) -> None:
    """A body may hang if its own process has not renewed for a whole TTL, while the supervisor has."""
    own, other, store = lease(limit=limit), supervisors(limit), timed.store
    store.acquire(own)
    if limit:
        own.use_slot(0)
    assert (0.0, False) == timed.told(own.lock)
    timed.wait(10)
    store.renew([own])
    timed.wait(4)
    assert (4.0, False) == timed.told(own.lock)
    for seconds in (4.0, 14.0, 24.0, 34.0, 44.0):
        store.renew([other])
        assert (seconds, seconds > TTL) == timed.told(own.lock)
        timed.wait(10)
    store.renew([own])
    assert (0.0, False) == timed.told(own.lock)


def test_a_lease_that_is_acquired_again(timed: Timed) -> None:
    """A new lease of a lock knows nothing of the one before: not of a reservation, nor of one that the store has lost."""
    own, store = lease(), timed.store
    store.acquire(own)
    timed.wait(1)
    store.renew([own])
    store.release(own, False, kept=AfterRelease("queued", 3600.0, queued_token("id")))
    timed.wait(100)
    assert (None, False) == timed.told(own.lock)
    again = LeaseSpec(BASE, "d", "token-e", TTL, "id", "w1@host", 4711)
    fence = store.acquire(again).fence
    assert (0.0, False) == timed.told(own.lock)
    timed.wait(20)
    assert (20.0, False) == timed.told(own.lock)
    store.reacquire(again, fence)
    assert (0.0, False) == timed.told(own.lock)
    timed.wait(40)
    store.reacquire(again, fence)
    timed.wait(5)
    assert (5.0, False) == timed.told(own.lock)
