"""Faults 49 to 51: the store loses its data or another server becomes its primary, with the settings for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.failover import SETTINGS, Load, Replicated, run, valkey_program
from tests.faults.harness import FIGURES, WorkerEnvironment, now
from tests.faults.matrix import LATE
from tests.servers import RedisServer, until

TTL = 3.0


def _flush(env: WorkerEnvironment) -> None:
    with env.client() as client:
        client.flushall()


def _restart(env: WorkerEnvironment) -> None:
    env.store.stop()
    env.store.start()


@pytest.mark.parametrize("lose", [_flush, pytest.param(_restart, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_lost_data_with_grace(pool: str, lose: Any) -> None:
    """The holder reacquires its lock, and nobody else gets it, whatever its policy and ``on_store_error``. All run once."""
    with WorkerEnvironment(ttl=TTL, singleton_lock_grace=True, singleton_on_store_error="run") as env:
        env.worker(pool, concurrency=3)
        first = env.send("retry", "known", expect="once")
        env.send("publish-wait", "known", expect="once")
        first.get(timeout=LATE)
        env.send("retry", "a", ["hold"], expect="once")
        body = env.body("a")
        env.wait("key", run=body["run"])
        with env.schedule.during("empty") as fault:
            lose(env)
        waiting = [env.send(name, "a", expect="once") for name in ("retry", "other", "wait")]
        waiting.append(env.send("publish-wait", "b", expect="once"))
        until(
            lambda: env.held(body) and env.ledger.events("store", verb="reacquire", does=["take"]), "reacquired", LATE
        )
        until(lambda: now() > fault.until + 2 * TTL, "a duplicate could have started", 3 * TTL)
        assert 1 == len(env.ledger.events("start", tag="a", work="retry a"))
        assert not env.ledger.events("lost")
        assert not env.ledger.events("store error")
        env.go("a")
        for result in waiting:
            result.get(timeout=LATE)
        late = min(event["at"] for event in env.ledger.events("start", work="other a")) - fault.until
        env.measured(f"49 store lost its data, with grace, {pool}: next run", TTL + 1.5, late, at_least=TTL - 1)
        env.finish()


@contextlib.contextmanager
def _with_replica(pool: str) -> Iterator[tuple[WorkerEnvironment, RedisServer]]:
    store = ("--repl-diskless-sync-delay", "0")
    with (
        WorkerEnvironment(ttl=TTL, store=store, singleton_lock_replicas=1) as env,
        RedisServer("--replicaof", "127.0.0.1", str(env.store.port)) as replica,
    ):
        env.worker(pool)
        until(lambda: _follows(env), "the replica has all")
        yield env, replica


def _follows(env: WorkerEnvironment) -> bool:
    with env.client() as client:
        client.set("seen", 1, px=100)
        return bool(client.wait(1, 100))


def _locks(env: WorkerEnvironment) -> Any:
    with env.client() as client:
        return client.keys("*:lock:*")


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_no_replica(pool: str) -> None:
    """A lock that no replica has is given back, at once and for good. Its task runs once the replica is there."""
    with _with_replica(pool) as (env, replica):
        env.send("retry", "before", expect="once").get(timeout=LATE)
        replica.stop()
        stopped = now()
        result = env.send("retry", "a", expect="once")
        until(lambda: result.state == "RETRY", "it is postponed", LATE)
        grants = env.ledger.events("store", verb="acquire", does=["take"])
        grant = next(event for event in grants if event["at"] > stopped)
        freed = env.wait("store", verb="release", does=["free"], run=grant["run"])
        env.measured(f"50 no replica, {pool}: lock released", 2.0, freed["at"] - grant["at"])
        assert not env.ledger.events("start", tag="a")
        until(lambda: not _locks(env), "no lock is left between two tries", LATE)
        back = now()
        replica.start()
        result.get(timeout=LATE)
        env.measured(f"50 no replica, {pool}: run after its return", 5.0, env.body("a")["at"] - back)
        env.finish()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ("redis", "planned"),
        ("redis", "killed"),
        ("redis", "partition"),
        ("redis", "stopped"),
        ("redis", "flushed"),
        ("valkey", "planned"),
        ("valkey", "coordinated"),
        ("valkey", "killed"),
        ("valkey", "partition"),
    ],
)
def test_failover(server: str, fault: str) -> None:
    """With both settings no two bodies run at once, no task fails, no lock is left, and bodies start again within 3 T + 3 s."""
    program = valkey_program() if server == "valkey" else ""
    if server == "valkey" and not program:
        pytest.skip("no Valkey")
    is_short = fault == "planned" and server == "redis"
    size: dict[str, Any] = {"keys": 4, "workers": 1, "waiting": 1, "bodies": (4.0, 6.0)} if is_short else {}
    with Replicated(program) as store, Load(store, **size, **SETTINGS) as load:
        (found,) = run(load, fault, heal=not is_short).values()
        print(found)
        assert not found.pairs
        bound = 3 * load.ttl + 3
        FIGURES.append(
            (f"51 failover, {server}, {fault}: longest time without a start", f"{bound:.3g} s", f"{found.pause:.2f} s")
        )
        assert found.pause <= bound
        load.drain()
