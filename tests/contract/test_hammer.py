"""Many threads and processes compete for few locks: no two are ever in one critical section."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import AcquireStatus, LockStore, RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.servers import RedisServer

SECONDS = 1.5
LOCKS = 3


def play(store: LockStore, base: str, enter: Callable[[str, str], bool], leave: Callable[[str, str], bool]) -> int:
    """Acquire random locks for some time, and return how many were granted.

    Arguments:
        enter: enters a lock's critical section with a token; returns false if another token is in it.
        leave: leaves the critical section; returns false if another token has entered it.

    Raises:
        AssertionError: the promise is broken.
    """
    until, granted = time.monotonic() + SECONDS, 0
    while time.monotonic() < until or granted < 2:  # of a slow thread's time little may be left
        digest = str(random.randrange(LOCKS))
        lease_request = LeaseSpec(
            base, digest, secrets.token_hex(8), 100.0, secrets.token_hex(4), supervised=random.random() < 0.5
        )
        other = LeaseSpec(base, digest, secrets.token_hex(8), 20.0, lease_request.task_id)
        store.release(other, success=True)  # a token without a lease releases nothing
        if store.acquire(lease_request).status is not AcquireStatus.GRANTED:
            assert store.renew([lease_request]) != [RenewResult.RENEWED], "renewed without a lease"
            continue
        granted += 1
        assert enter(digest, lease_request.token), "two in one critical section"
        for _ in range(random.randrange(3)):
            assert [RenewResult.RENEWED] == store.renew([lease_request]), "lost within its TTL"
        assert leave(digest, lease_request.token), "someone came in between"
        store.release(lease_request, success=True)
        store.release(lease_request, success=True)
    return granted


def test_threads_in_memory() -> None:
    """Threads of one process exclude each other with the store in memory."""
    store, inside = MemoryStore(), {}

    def enter(digest: str, token: str) -> bool:
        return inside.setdefault(digest, token) == token

    def leave(digest: str, token: str) -> bool:
        return inside.pop(digest) == token

    hammer(8, lambda: play(store, "b:{t}", enter, leave))


def hammer(threads: int, work: Callable[[], int]) -> None:
    """Do the work in several threads, and check that all succeed and that locks were granted."""
    granted: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            granted.append(work())
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert [] == failures
    assert threads == len(granted)
    assert sum(granted) > threads


def on_server(url: str, base: str, threads: int) -> None:
    """Compete for locks on a server, which also records the critical sections."""
    store = RedisStore(connector(url, {}), 60.0, 3)
    redis: Any = Redis.from_url(url, decode_responses=True)

    def enter(digest: str, token: str) -> bool:
        return bool(redis.set(f"{base}:inside:{digest}", token, nx=True))

    def leave(digest: str, token: str) -> bool:
        return bool(redis.getdel(f"{base}:inside:{digest}") == token)

    hammer(threads, lambda: play(store, base, enter, leave))


def test_threads_and_processes_on_redis(redis_server: RedisServer) -> None:
    """Threads of several processes exclude each other and leave no keys behind."""
    url, base = redis_server.url(), f"hammer:{{{secrets.token_hex(6)}}}"
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 1
        try:
            on_server(url, base, threads=4)
            code = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    try:
        on_server(url, base, threads=4)
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert [0, 0, 0] == codes
    with Redis.from_url(url, decode_responses=True) as redis:
        assert [] == [
            key for key in redis.scan_iter(match=f"{base}*", count=1000) if not key.endswith((":fence", ":recent"))
        ]
