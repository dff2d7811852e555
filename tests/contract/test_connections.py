"""However often a store is called, and whatever it answers, its connections stay few."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import StoreError
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.redis.pool import MOST_IDLE
from celery_singleton_lock.store.requests import LeaseSpec
from tests.connections import Connections
from tests.contract.conftest import MakeStore
from tests.contract.test_redis import CALLS
from tests.servers import RedisServer, until

MakeRequest = Callable[..., LeaseSpec]

TIMES = 1000
#: Each call that reads or writes records, besides those of `CALLS`.
RECORD_CALLS: dict[str, Callable[[Any, LeaseSpec], Any]] = {
    "add_tasks": lambda records, one: records.add_tasks("tasks", {"a": "a"}),
    "tasks": lambda records, one: records.tasks("tasks"),
    "slots": lambda records, one: records.slots(one.base, one.digest),
    "sweep": lambda records, one: records.sweep(one.base),
    "locks": lambda records, one: list(records.locks(one.base)),
    "count": lambda records, one: records.count(one.base, {"renewals": 1}),
    "counters": lambda records, one: records.counters(one.base),
    "history": lambda records, one: records.history(one.base),
    "pause": lambda records, one: records.pause(one.base, one.digest, 1.0),
    "resume": lambda records, one: records.resume(one.base, one.digest),
    "server": lambda records, one: records.server(),
}


@pytest.fixture
def counter(own_server: Callable[..., RedisServer]) -> Iterator[tuple[RedisServer, Connections]]:
    """Yield a server that only this test uses, and what counts its clients."""
    server = own_server()
    found = Connections(server)
    yield server, found
    found.close()


@pytest.mark.parametrize("verb", CALLS)
def test_verbs_of_the_store(
    counter: tuple[RedisServer, Connections], redis_store: MakeStore, lease_request: MakeRequest, verb: str
) -> None:
    """A thousand calls of a verb, one after the other, need one connection."""
    server, count = counter
    store = redis_store(server.url())
    for number in range(TIMES):
        CALLS[verb](store, lease_request(f"{number % 7}"))
    count.check(1, 1)


@pytest.mark.parametrize("verb", RECORD_CALLS)
def test_verbs_of_the_records(counter: tuple[RedisServer, Connections], lease_request: MakeRequest, verb: str) -> None:
    """A thousand calls that read or write records need one connection."""
    server, count = counter
    store = RedisStore(connector(server.url(), {}), 30.0, None, 10)
    for number in range(TIMES):
        RECORD_CALLS[verb](store.records(), lease_request(f"{number % 7}"))
    count.check(1, 1)
    store.close()
    until(lambda: count.clients() == 0, "the connection is closed")


@pytest.mark.parametrize("verb", ["acquire", "revoke"])
@pytest.mark.parametrize("login", ["", "nobody:pw@"], ids=["answer", "login"])
def test_refused_calls(
    counter: tuple[RedisServer, Connections], redis_store: MakeStore, lease_request: MakeRequest, verb: str, login: str
) -> None:
    """A thousand calls that are refused, by an answer or at the login, leave one connection at most."""
    server, count = counter
    one = lease_request()
    with Redis.from_url(server.url()) as client:
        client.set(one.lock, "theirs")
        client.connection_pool.disconnect()  # redis-py 4 leaves the connection open
    store = redis_store(server.url().replace("redis://", f"redis://{login}"))
    for _ in range(TIMES):
        with pytest.raises(StoreError):
            CALLS[verb](store, one)
    count.check(1, 1)


def test_many_threads_at_once(
    counter: tuple[RedisServer, Connections], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """After many threads have called a store without a limit at once, it keeps a few idle connections only."""
    server, count = counter
    store, threads = redis_store(server.url(), timeout=60.0), 5 * MOST_IDLE
    server.pause()  # so that all calls are under way at the same time
    running = [threading.Thread(target=store.holder, args=(lease_request().lock,)) for _ in range(threads)]
    for thread in running:
        thread.start()
    until(lambda: count.more_files() >= threads, "all have connected", 30)
    server.resume()
    for thread in running:
        thread.join()
    assert count.more_files() == MOST_IDLE
    until(lambda: count.clients() == MOST_IDLE, "the others are closed")
