"""How often operators' questions wait for the store: the number of round trips counts, as each costs the time of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import locks
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.servers import RedisServer

NAMES = [f"job.{number}" for number in range(500)]


class Sends:
    """Counts what the connections of a store send; each send waits for its replies."""

    def __init__(self, url: str) -> None:
        self.count = 0
        self._connect = connector(url, {})

    def connect(self) -> Any:
        connection = self._connect()
        send = connection.send_packed_command

        def counted(*args: Any, **more: Any) -> None:
            self.count += 1
            send(*args, **more)

        connection.send_packed_command = counted
        return connection


@pytest.fixture
def sends(redis_server: RedisServer) -> Sends:
    return Sends(redis_server.url())


@pytest.fixture
def app(own_server: Callable[..., RedisServer]) -> Iterator[Celery]:
    """Yield an app whose store knows many task names, each with a run that has ended, one that expired, and one that goes on."""
    server = own_server()
    settings = {"singleton_lock_url": server.url(), "singleton_lock_store_timeout": 30.0}
    app = Celery("many", broker="memory://", set_as_current=False, changes=settings)
    store: Any = context_of(app).store
    store.records().add_tasks("singleton:tasks", {name: name for name in NAMES})
    for name in NAMES:
        lasts, ends = (request(name, digit) for digit in "ab")
        for one in (lasts, ends):
            store.acquire(one)
        store.release(ends, True)
    store.acquire(request("job.7", "c", ttl=0.001))
    store.records().pause("singleton:{job.9}", "*", 60.0)
    yield app
    app.close()


def request(name: str, digit: str, ttl: float = 600.0) -> LeaseSpec:
    return LeaseSpec(f"singleton:{{{name}}}", digit * 32, f"{digit}-{name}", ttl, f"{name}-{digit}", "w1@host", 4711)


@pytest.fixture
def counted(app: Celery) -> Sends:
    """Count what the app's store sends from now on."""
    context = context_of(app)
    found = Sends(context.settings.url)
    context.store = RedisStore(found.connect, 30.0, history=100)
    context.store.records().tasks("singleton:tasks")  # connects
    found.count = 0
    return found


@pytest.mark.parametrize("is_new", [False, True])
def test_all_tasks_in_few_round_trips(app: Celery, counted: Sends, is_new: bool) -> None:
    """Locks and statistics of 500 task names take at most 60 round trips, and twice as many once the server lost its scripts."""
    if is_new:
        context_of(app).store.command("SCRIPT", "FLUSH")  # type: ignore[attr-defined]
        counted.count = 0
    listed = {lock.key for lock in locks.find(app)}
    assert counted.count <= 60 * (1 + is_new)
    counted.count = 0
    found = {one.task: one for one in locks.stats(app)}
    assert counted.count <= 60 * (1 + is_new)
    assert {*(request(name, "a").lock for name in NAMES), "singleton:{job.9}:lock:*"} == listed
    assert {"running": 1} == found["job.8"].states
    assert {"running": 1, "paused": 1} == found["job.9"].states
    assert (2, 1) == (found["job.8"].counters["acquired"], found["job.8"].counters["released:other"])


def test_error_in_a_batch(app: Celery, counted: Sends) -> None:
    """A key of another type is an error for the question that met it, not for the next one on the same connection."""
    store: Any = context_of(app).store
    for key in ("singleton:{job.1}:pauses", "singleton:{job.2}:registry"):
        store.command("SET", key, "no hash")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        locks.find(app)
    assert ["job.3-a"] == [lock.holder.task_id for lock in locks.find(app, "job.3")]


def test_many_locks_of_one_task(app: Celery, counted: Sends) -> None:
    """A long registry is read in parts, beside which the other names are read once only."""
    store: Any = context_of(app).store
    for number in range(300):
        spec = request("job.3", "a")
        spec = LeaseSpec(spec.base, f"{number:032x}", f"token-{number}", 600.0, f"task-{number}", "w1@host", 4711)
        store.acquire(spec)
    counted.count = 0
    assert 300 + len(NAMES) + 1 == len({lock.key for lock in locks.find(app)}) == len(locks.find(app))
    assert counted.count <= 2 * 70


def test_expired_leases_are_counted(app: Celery, counted: Sends) -> None:
    """More leases than one sweep counts are counted as expired, and are no locks any more."""
    store: Any = context_of(app).store
    for number in range(400):
        store.acquire(LeaseSpec("singleton:{job.5}", f"{number:032x}", f"t{number}", 0.001, f"task-{number}", "n", 1))
    for entry in store.command("ZRANGEBYSCORE", "singleton:{job.5}:registry", "-inf", "+inf"):
        store.command("ZINCRBY", "singleton:{job.5}:registry", "-5000", entry)
    (found,) = locks.stats(app, "job.5")
    assert (400, {"running": 1}) == (found.counters["expired"], found.states)
