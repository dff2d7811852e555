"""A store that answers and takes no writes: the exporter and `check` say so, and what can be read is still shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner, Result

from celery_singleton_lock import locks
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.requests import LeaseSpec
from tests.operate.test_exporter import exporter, scrape
from tests.servers import RedisServer, free_port

#: What makes a server refuse writes, the way back, and what it says then.
REFUSALS = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "OOM|used memory"),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "read only replica"),
    "alone": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "(?i)NOREPLICAS|not enough good replicas",
    ),
}
every_refusal = pytest.mark.parametrize("refusal", REFUSALS)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as found:
        yield found


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url(), decode_responses=True) as found:
        found.flushall()
        yield found
        for _, mend, _ in REFUSALS.values():
            found.execute_command(*mend)


@pytest.fixture
def app(server: RedisServer, client: Any) -> Celery:
    """Return an app whose store has a task with a run that goes on, and one whose lease has expired and is not counted yet."""
    app = Celery("refusing", broker="memory://", set_as_current=False, changes={"singleton_lock_url": server.url()})
    store = context_of(app).store
    store.records().add_tasks("singleton:tasks", {"shop.sync": "shop.sync"})
    for digit, ttl in (("a", 600.0), ("b", 0.001)):
        store.acquire(LeaseSpec("singleton:{shop.sync}", digit * 32, f"token-{digit}", ttl, digit, "w1@host", 1))
    for entry in client.zrange("singleton:{shop.sync}:registry", 0, 1):
        client.zincrby("singleton:{shop.sync}:registry", -5000, entry)
    return app


def command(app: Celery, *words: str) -> Result:
    return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=app))


@every_refusal
def test_check(app: Celery, client: Any, refusal: str) -> None:
    """`check` is CRITICAL, with what the store said, and shows the numbers; afterwards it is OK."""
    assert 0 == command(app, "check").exit_code
    breaks, mends, said = REFUSALS[refusal]
    client.execute_command(*breaks)
    done = command(app, "check", "--max-age", "1h")
    assert done.output.startswith("SINGLETON CRITICAL - the store takes no writes: "), done.output
    assert (2, True) == (done.exit_code, " | locks=" in done.output)
    health = locks.check(app)
    assert re.search(said, health.text)
    assert "CRITICAL" == json.loads(command(app, "check", "--json").output)["status"]
    client.execute_command(*mends)
    assert 0 == command(app, "check").exit_code


@every_refusal
def test_exporter(app: Celery, server: RedisServer, client: Any, refusal: str) -> None:
    """The store is up and not writable; the metrics of tasks are there, and an expired lease is counted once it can be."""
    breaks, mends, _ = REFUSALS[refusal]
    with exporter(server.url()) as (_, url):
        well = scrape(url)
        assert (1, 1) == (well.value("store_up"), well.value("store_writable"))
        client.hset("singleton:{shop.sync}:stats", "expired", 0)
        client.zadd("singleton:{shop.sync}:registry", {"running\x1f1\x1f2\x1f3\x1fn\x1fc\x1ft": 1})
        client.execute_command(*breaks)
        broken = scrape(url)
        assert (1, 0) == (broken.value("store_up"), broken.value("store_writable"))
        assert 1 == broken.sum("leases", "shop.sync")
        # Redis lets a script go on that has begun with a command which needs no memory.
        assert (refusal == "full") == broken.sum("expired_total", "shop.sync")
        client.execute_command(*mends)
        mended = scrape(url)
    assert (1, 1, 1) == (
        mended.value("store_up"),
        mended.value("store_writable"),
        mended.sum("expired_total", "shop.sync"),
    )


def test_probe_expires(app: Celery, client: Any) -> None:
    """The probe writes one key of its own, which expires."""
    before = set(client.keys())
    locks.probe(app)
    (key,) = set(client.keys()) - before
    assert ("singleton:{}:check", True) == (key, 0 < client.pttl(key) <= 60_000)


def test_store_away_is_not_writable() -> None:
    """Of a store that cannot be reached, both are 0."""
    with exporter(f"redis://127.0.0.1:{free_port()}/0") as (_, url):
        away = scrape(url)
    assert (0, 0) == (away.value("store_up"), away.value("store_writable"))
