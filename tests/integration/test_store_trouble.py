"""The store is away, refuses, or is not what it should be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import chain, chord, states

from celery_singleton_lock import StoreUnavailable
from tests.integration.environment import WorkerEnvironment
from tests.servers import RedisServer, until


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture(scope="module", params=["prefork", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def away(own_store: RedisServer) -> Iterator[RedisServer]:
    """The store, stopped; started again after the test at the latest."""
    own_store.stop()
    yield own_store
    own_store.stop()
    own_store.start()


def then(env: WorkerEnvironment) -> Any:
    return env.app.tasks["then"].si(env.other_tag("then"))


def collect(env: WorkerEnvironment) -> Any:
    return env.app.tasks["collect"].s(env.other_tag("collected"))


class TestRetry:
    def test_single(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The run is postponed until the store is back, and its own retries are untouched."""
        result = env.job("store_retry").delay(env.tag)
        env.wait_for_state(result, states.RETRY)
        assert [] == env.starts()
        away.start()
        assert "done" == env.get(result)
        assert 0 == env.starts()[0]["retries"]
        assert env.starts()[0]["protected"] is True

    def test_chain(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """A chain waits for it, and goes on."""
        last = chain(env.job("store_retry").si(env.tag), then(env))()
        env.wait_for_state(last.parent, states.RETRY)
        away.start()
        assert env.get(last).startswith("then")

    def test_chord(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """So does a chord."""
        job = env.job("store_retry")
        header = [job.si(env.tag), job.si(env.other_tag("other"))]
        result = chord(header)(collect(env))
        env.wait_for_state(result.parent.results[0], states.RETRY)
        away.start()
        assert ["done", "done"] == env.get(result)

    def test_cannot_publish_either(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """Early acknowledgement: nothing can bring the message back, so it is a FAILURE."""
        env.allow_publishing(False)
        result = env.job("store_retry").delay(env.tag)
        assert isinstance(env.error(result), StoreUnavailable)
        assert [] == env.starts()

    def test_cannot_publish_either_chain(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """A chain ends there: nobody waits for what does not come."""
        env.allow_publishing(False)
        last = chain(env.job("store_retry").si(env.tag), then(env))()
        assert isinstance(env.error(last.parent), StoreUnavailable)
        assert isinstance(env.error(last), StoreUnavailable)
        assert [] == env.starts()

    def test_cannot_publish_either_chord(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """A chord fails with its member."""
        env.allow_publishing(False)
        job = env.job("store_retry")
        result = chord([job.si(env.tag), job.si(env.other_tag("other"))])(collect(env))
        assert isinstance(env.error(result), StoreUnavailable)
        assert [] == env.starts()

    def test_cannot_publish_either_late(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """Late acknowledgement: the message goes back to the queue, and is run in the end."""
        env.allow_publishing(False)
        result = env.job("store_retry_late").delay(env.tag)
        until(lambda: len(env.signals(result.id, "task_prerun")) >= 2, "delivered again")
        assert result.state not in states.READY_STATES
        away.start()
        env.allow_publishing(True)
        assert "done" == env.get(result)
        assert 1 == len(env.starts())

    @pytest.fixture
    def no_publish(self, env: WorkerEnvironment) -> Iterator[None]:
        """Let the worker publish again, whatever happens."""
        yield
        env.allow_publishing(True)


class TestRun:
    def test_single(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The body runs unprotected, and its lease says so."""
        assert "done" == env.get(env.job("store_run").delay(env.tag))
        assert env.starts()[0]["protected"] is False

    def test_chain_and_chord(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """Chains and chords go on as if there were no lock."""
        job = env.job("store_run")
        assert env.get(chain(job.si(env.tag), then(env))()).startswith("then")
        assert ["done", "done"] == env.get(chord([job.si(env.tag)] * 2)(collect(env)))


class TestRaise:
    def test_single(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The run fails with StoreUnavailable."""
        assert isinstance(env.error(env.job("store_raise").delay(env.tag)), StoreUnavailable)
        assert [] == env.starts()

    def test_chain(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The rest of a chain is not run."""
        last = chain(env.job("store_raise").si(env.tag), then(env))()
        assert isinstance(env.error(last), StoreUnavailable)
        assert [] == env.events("then", env.other_tag("then"))

    def test_chord(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The body of a chord fails."""
        job = env.job("store_raise")
        result = chord([job.si(env.tag), job.si(env.other_tag("other"))])(collect(env))
        assert env.chord_failed(result)


@pytest.mark.parametrize("name", ["store_retry", "store_run", "store_raise"])
def test_it_is_told(env: WorkerEnvironment, away: RedisServer, name: str) -> None:
    """A WARNING with the task and a signal, whatever is done about it."""
    result = env.job(name).delay(env.tag)
    until(lambda: env.lock_signals(env.key(name), "store_error"), "the signal")
    event = env.lock_signals(env.key(name), "store_error")[0]
    assert result.id == event["task_id"]
    assert event["task"] == f"job.{name}"
    assert env.worker.wait_for_lines(": WARNING/", result.id)
    result.revoke()


@pytest.mark.parametrize("name", ["store_run", "store_raise"])
def test_frozen_store_costs_its_timeout(env: WorkerEnvironment, own_store: RedisServer, name: str) -> None:
    """A store that accepts and never answers is given up after one store timeout (1 s)."""
    env.get(env.job(name).delay(env.other_tag("warm")))
    own_store.pause()
    try:
        sent = time.monotonic()
        env.job(name).delay(env.tag).get(timeout=20, propagate=False)
        took = time.monotonic() - sent
    finally:
        own_store.resume()
    # One call to acquire; a body that ran unprotected has nothing to release.
    assert 0.8 < took < 2.5


def test_release_does_not_touch_the_result(env: WorkerEnvironment, away: RedisServer) -> None:
    """The store goes away while the body runs: the task still succeeds."""
    away.start()
    result = env.hold("long")
    away.stop()
    env.let_go()
    assert "held" == env.get(result)


def test_restarted_store_without_its_scripts(env: WorkerEnvironment, away: RedisServer) -> None:
    """A store that forgot the scripts is no error."""
    away.start()
    assert "done" == env.get(env.job("store_raise").delay(env.tag))
    with redis.Redis.from_url(away.url()) as client:
        client.script_flush()
    assert "done" == env.get(env.job("store_raise").delay(env.tag))


@pytest.mark.parametrize("name", ["store_run", "store_retry", "store_raise"])
def test_wrong_type_always_raises(env: WorkerEnvironment, own_store: RedisServer, name: str) -> None:
    """Somebody else's data under the lock key is no outage: it is an error under any setting."""
    with redis.Redis.from_url(own_store.url()) as client:
        client.rpush(env.key(name), "not", "ours")
        client.expire(env.key(name), 60)
        error = env.error(env.job(name).delay(env.tag))
        assert "Store" in type(error).__name__
        assert [b"not", b"ours"] == client.lrange(env.key(name), 0, -1)
    assert [] == env.starts()


class TestWhileABodyRuns:
    def test_store_that_lost_the_key(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """A key that vanished is taken again by the next renewal, with a WARNING, and not lost."""
        holder = env.hold("skip_short")
        key = env.key("skip_short")
        with redis.Redis.from_url(own_store.url()) as client:
            assert 1 == client.delete(key)
            until(lambda: client.exists(key), "the key is there again", 2.0)
        assert holder.id == env.job("skip_short").lock_holder(env.tag).task_id
        assert 1 == len(env.worker.wait_for_lines(": WARNING/", key))
        assert env.get(env.job("skip_short").delay(env.tag)) is None
        env.let_go()
        assert "held" == env.get(holder)
        assert [] == env.lock_signals(key, "lock_lost")
        assert not env.is_locked("skip_short")

    def test_restarted_store(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """So it is after a restart that lost all data, scripts and connections, within the TTL."""
        holder = env.hold("skip_short")
        own_store.stop()
        own_store.start()
        until(lambda: env.is_locked("skip_short"), "the key is there again", 2.0)
        env.let_go()
        assert "held" == env.get(holder)
        assert [] == env.lock_signals(env.key("skip_short"), "lock_lost")
        assert not env.is_locked("skip_short")

    def test_short_outage(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """A store that does not answer for less than the TTL costs no lease."""
        holder = env.hold("skip_short", acts=["hold_watching", "return"])
        for _ in range(2):
            own_store.pause()
            time.sleep(1.0)
            own_store.resume()
            time.sleep(0.8)
        env.let_go()
        assert "supervised" == env.get(holder)
        assert [] == env.lock_signals(env.key("skip_short"), "lock_lost")
        assert [] == env.events("not-held")

    def test_long_outage(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """Past the deadline the lease is lost, told once, for good; the result is untouched."""
        away.start()
        holder = env.hold("skip_short", acts=["hold_watching", "return"])
        away.stop()
        key = env.key("skip_short")
        until(lambda: env.lock_signals(key, "lock_lost"), "lock_lost", 4.0)
        seen = env.wait_for("not-held", timeout=1.0)
        assert 1.0 < seen["at"] - env.starts()[0]["at"] < 2.3
        away.start()
        time.sleep(1.5)
        env.let_go()
        assert "supervised" == env.get(holder)
        assert 1 == len(env.lock_signals(key, "lock_lost"))
        assert not env.is_locked("skip_short")

    def test_long_outage_told_to_the_body(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """Under raise the body ends with LockLost."""
        away.start()
        holder = env.hold("told")
        away.stop()
        assert "LockLost" == type(env.error(holder)).__name__
        assert "LockLost" == env.events("error")[0]["error"]


def test_outage_is_never_autoretried(env: WorkerEnvironment, away: RedisServer) -> None:
    """autoretry_for=(Exception,) does not turn StoreUnavailable into a retry."""
    result = env.job("store_auto").delay(env.tag)
    assert isinstance(env.error(result), StoreUnavailable)
    env.finish(result.id)
    assert [] == env.signals(result.id, "task_retry")
