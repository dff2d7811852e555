"""`singleton_lock_replicas`: a lease and its renewals count only once so many replicas have them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.store.protocol import AcquireStatus, RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import KINDS, VALKEY
from tests.contract.test_round_trips import Sends
from tests.servers import RedisServer, until

MakeRequest = Callable[..., LeaseSpec]
TIMEOUT = 2.0  # longer than a moment of slowness


class Pair:
    """A primary and its replica, and a store that wants each lease on the replica."""

    def __init__(self, program: str) -> None:
        self.primary = RedisServer(program=program).start()
        behind = ("--replicaof", "127.0.0.1", str(self.primary.port), "--repl-diskless-sync-delay", "0")
        self.replica = RedisServer(*behind, program=program).start()
        self.admin: Any = Redis(port=self.primary.port, decode_responses=True)
        self.admin.config_set("repl-diskless-sync-delay", 0)
        self.sends = Sends(self.primary.url())
        self.store = RedisStore(self.sends.connect, TIMEOUT, None, 5, replicas=1)
        self.join()

    def join(self) -> None:
        """Wait until the replica follows its primary."""
        until(lambda: self.admin.set("joined", 1, px=1) and self.admin.wait(1, 100), "the replica acknowledges writes")

    def cut(self) -> None:
        """Have the replica follow nobody."""
        with Redis(port=self.replica.port) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        until(lambda: self.admin.info("replication")["connected_slaves"] == 0, "it is gone")

    def mend(self) -> None:
        """Have the replica follow its primary again."""
        with Redis(port=self.replica.port) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", str(self.primary.port))
        self.join()

    def close(self) -> None:
        self.store.close()
        self.admin.close()
        self.replica.close()
        self.primary.close()


@pytest.fixture(params=KINDS[1:])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(str(VALKEY) if request.param == "valkey" else "")
    yield made
    made.close()


def test_the_replica_has_it(pair: Pair, lease_request: MakeRequest) -> None:
    """The replica has a lock, and its renewal, when the call returns. Each call waits for the network once."""
    spec = lease_request(ttl=60.0)
    with Redis(port=pair.replica.port) as copy:
        pair.store.acquire(lease_request("first"))  # connects, and tells the server its script
        pair.sends.count = 0
        assert AcquireStatus.GRANTED is pair.store.acquire(spec).status
        assert copy.exists(spec.lock)
        pair.admin.pexpire(spec.lock, 30_000)
        pair.store.renew([spec])
        pair.sends.count = 1
        assert [RenewResult.RENEWED] == pair.store.renew([spec])
        assert copy.pttl(spec.lock) > 50_000
        assert 2 == pair.sends.count


@pytest.mark.parametrize("verb", ["acquire", "renew", "reacquire", "held", "check"])
def test_no_replica(pair: Pair, lease_request: MakeRequest, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Without the replica no answer counts, which is known within the timeout of the call."""
    monkeypatch.setattr("celery_singleton_lock.store.redis.store.WAIT_MARGIN", TIMEOUT / 2)
    held = lease_request()
    fence = pair.store.acquire(held).fence
    calls: dict[str, Callable[[], Any]] = {
        "acquire": lambda: pair.store.acquire(lease_request(secrets.token_hex(4))),
        "renew": lambda: pair.store.renew([held]),
        "reacquire": lambda: pair.store.reacquire(held, fence),
        "held": lambda: pair.store.acquire(lease_request()),
        "check": lambda: pair.store.check(held.base),
    }
    calls[verb]()  # so that the server knows its script
    pair.cut()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="0 replicas have its answer, but singleton_lock_replicas is 1"):
        calls[verb]()
    assert time.monotonic() - begun < 2 * TIMEOUT
    pair.mend()
    until(lambda: pair.store.renew([held]) == [RenewResult.RENEWED], "it counts again")


def test_release_needs_no_replica(pair: Pair, lease_request: MakeRequest) -> None:
    """A lock that the replica does not have is given back at once: release waits for nobody."""
    spec = lease_request()
    pair.store.acquire(lease_request("first"))
    pair.cut()
    with pytest.raises(StoreUnavailable):
        pair.store.acquire(spec)
    assert pair.admin.exists(spec.lock)
    begun = time.monotonic()
    pair.store.release(spec, None)
    assert time.monotonic() - begun < TIMEOUT / 2
    assert not pair.admin.exists(spec.lock)


def test_connections_are_made_anew(pair: Pair, lease_request: MakeRequest) -> None:
    """After that, no store of the process uses a connection that it had before: the next one may find another primary."""
    clone = pair.store.clone()
    clone.acquire(lease_request("first"))
    before = {one["id"] for one in pair.admin.client_list(_type="normal")}
    pair.cut()
    with pytest.raises(StoreUnavailable):
        pair.store.acquire(lease_request())
    pair.mend()
    clone.acquire(lease_request("second"))
    pair.store.acquire(lease_request("third"))
    mine = {str(pair.admin.client_id())}

    def left() -> set[str]:
        return {one["id"] for one in pair.admin.client_list(_type="normal")}

    until(lambda: mine == left() & before, "the server has closed the others")
    assert 3 == len(left())
    clone.close()


def test_too_few(pair: Pair, lease_request: MakeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two wanted, one replica is not enough."""
    monkeypatch.setattr("celery_singleton_lock.store.redis.store.WAIT_MARGIN", TIMEOUT / 2)
    pair.store.acquire(lease_request("first"))  # so that the server knows the script
    store = RedisStore(connector(pair.primary.url(), {}), TIMEOUT, None, 5, replicas=2)
    with pytest.raises(StoreUnavailable, match="1 replicas have its answer, but singleton_lock_replicas is 2"):
        store.acquire(lease_request())
    store.close()


def test_wait_is_not_allowed(pair: Pair, lease_request: MakeRequest) -> None:
    """A login that may not send WAIT gets no lock, and none stays."""
    pair.admin.execute_command("ACL", "SETUSER", "locks", "on", ">pass", "~*", "+@all", "-wait")
    url = pair.primary.url().replace("redis://", "redis://locks:pass@")
    store, spec = RedisStore(connector(url, {}), TIMEOUT, replicas=1), lease_request()
    with pytest.raises(StoreUnavailable, match="WAIT"):
        store.acquire(spec)
    store.release(spec, None)
    assert not pair.admin.exists(spec.lock)
    store.close()


def test_without_it_nothing_waits(pair: Pair, lease_request: MakeRequest) -> None:
    """Without the setting a store sends no WAIT, and needs no replica."""
    pair.cut()
    store = RedisStore(connector(pair.primary.url(), {}), TIMEOUT)
    with pair.admin.monitor() as monitor:
        store.acquire(lease_request())
        pair.admin.echo("over")
        words = []
        while "ECHO" not in (word := monitor.next_command()["command"]):
            words.append(word)
    assert not [word for word in words if "WAIT" in word]
    store.close()
