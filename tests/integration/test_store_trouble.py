"""The store is away, refuses, or is not what it should be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import chain, chord, states

from celery_singleton_lock import StoreUnavailable
from tests.integration.bench import Bench
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


def then(bench: Bench) -> Any:
    return bench.app.tasks["then"].si(bench.other_tag("then"))


def collect(bench: Bench) -> Any:
    return bench.app.tasks["collect"].s(bench.other_tag("collected"))


class TestRetry:
    def test_single(self, bench: Bench, away: RedisServer) -> None:
        """The run is postponed until the store is back, and its own retries are untouched."""
        result = bench.job("store_retry").delay(bench.tag)
        bench.wait_for_state(result, states.RETRY)
        assert [] == bench.starts()
        away.start()
        assert "done" == bench.get(result)
        assert 0 == bench.starts()[0]["retries"]
        assert bench.starts()[0]["protected"] is True

    def test_chain(self, bench: Bench, away: RedisServer) -> None:
        """A chain waits for it, and goes on."""
        last = chain(bench.job("store_retry").si(bench.tag), then(bench))()
        bench.wait_for_state(last.parent, states.RETRY)
        away.start()
        assert bench.get(last).startswith("then")

    def test_chord(self, bench: Bench, away: RedisServer) -> None:
        """So does a chord."""
        job = bench.job("store_retry")
        header = [job.si(bench.tag), job.si(bench.other_tag("other"))]
        result = chord(header)(collect(bench))
        bench.wait_for_state(result.parent.results[0], states.RETRY)
        away.start()
        assert ["done", "done"] == bench.get(result)

    def test_cannot_publish_either(self, bench: Bench, away: RedisServer, no_publish: None) -> None:
        """Early acknowledgement: nothing can bring the message back, so it is a FAILURE."""
        bench.allow_publishing(False)
        result = bench.job("store_retry").delay(bench.tag)
        assert isinstance(bench.error(result), StoreUnavailable)
        assert [] == bench.starts()

    def test_cannot_publish_either_chain(self, bench: Bench, away: RedisServer, no_publish: None) -> None:
        """A chain ends there: nobody waits for what does not come."""
        bench.allow_publishing(False)
        last = chain(bench.job("store_retry").si(bench.tag), then(bench))()
        assert isinstance(bench.error(last.parent), StoreUnavailable)
        assert isinstance(bench.error(last), StoreUnavailable)
        assert [] == bench.starts()

    def test_cannot_publish_either_chord(self, bench: Bench, away: RedisServer, no_publish: None) -> None:
        """A chord fails with its member."""
        bench.allow_publishing(False)
        job = bench.job("store_retry")
        result = chord([job.si(bench.tag), job.si(bench.other_tag("other"))])(collect(bench))
        assert isinstance(bench.error(result), StoreUnavailable)
        assert [] == bench.starts()

    def test_cannot_publish_either_late(self, bench: Bench, away: RedisServer, no_publish: None) -> None:
        """Late acknowledgement: the message goes back to the queue, and is run in the end."""
        bench.allow_publishing(False)
        result = bench.job("store_retry_late").delay(bench.tag)
        until(lambda: len(bench.signals(result.id, "task_prerun")) >= 2, "delivered again")
        assert result.state not in states.READY_STATES
        away.start()
        bench.allow_publishing(True)
        assert "done" == bench.get(result)
        assert 1 == len(bench.starts())

    @pytest.fixture
    def no_publish(self, bench: Bench) -> Iterator[None]:
        """Let the worker publish again, whatever happens."""
        yield
        bench.allow_publishing(True)


class TestRun:
    def test_single(self, bench: Bench, away: RedisServer) -> None:
        """The body runs unprotected, and its lease says so."""
        assert "done" == bench.get(bench.job("store_run").delay(bench.tag))
        assert bench.starts()[0]["protected"] is False

    def test_chain_and_chord(self, bench: Bench, away: RedisServer) -> None:
        """Chains and chords go on as if there were no lock."""
        job = bench.job("store_run")
        assert bench.get(chain(job.si(bench.tag), then(bench))()).startswith("then")
        assert ["done", "done"] == bench.get(chord([job.si(bench.tag)] * 2)(collect(bench)))


class TestRaise:
    def test_single(self, bench: Bench, away: RedisServer) -> None:
        """The run fails with StoreUnavailable."""
        assert isinstance(bench.error(bench.job("store_raise").delay(bench.tag)), StoreUnavailable)
        assert [] == bench.starts()

    def test_chain(self, bench: Bench, away: RedisServer) -> None:
        """The rest of a chain is not run."""
        last = chain(bench.job("store_raise").si(bench.tag), then(bench))()
        assert isinstance(bench.error(last), StoreUnavailable)
        assert [] == bench.events("then", bench.other_tag("then"))

    def test_chord(self, bench: Bench, away: RedisServer) -> None:
        """The body of a chord fails."""
        job = bench.job("store_raise")
        result = chord([job.si(bench.tag), job.si(bench.other_tag("other"))])(collect(bench))
        assert bench.chord_failed(result)


@pytest.mark.parametrize("name", ["store_retry", "store_run", "store_raise"])
def test_it_is_told(bench: Bench, away: RedisServer, name: str) -> None:
    """A WARNING with the task and a signal, whatever is done about it."""
    result = bench.job(name).delay(bench.tag)
    until(lambda: bench.lock_signals(bench.key(name), "store_error"), "the signal")
    event = bench.lock_signals(bench.key(name), "store_error")[0]
    assert result.id == event["task_id"]
    assert event["task"] == f"job.{name}"
    assert bench.worker.wait_for_lines(": WARNING/", result.id)
    result.revoke()


@pytest.mark.parametrize("name", ["store_run", "store_raise"])
def test_frozen_store_costs_its_timeout(bench: Bench, own_store: RedisServer, name: str) -> None:
    """A store that accepts and never answers is given up after one store timeout (1 s)."""
    bench.get(bench.job(name).delay(bench.other_tag("warm")))
    own_store.pause()
    try:
        sent = time.monotonic()
        bench.job(name).delay(bench.tag).get(timeout=20, propagate=False)
        took = time.monotonic() - sent
    finally:
        own_store.resume()
    # One call to acquire; a body that ran unprotected has nothing to release.
    assert 0.8 < took < 2.5


def test_release_does_not_touch_the_result(bench: Bench, away: RedisServer) -> None:
    """The store goes away while the body runs: the task still succeeds."""
    away.start()
    result = bench.hold("long")
    away.stop()
    bench.let_go()
    assert "held" == bench.get(result)


def test_restarted_store_without_its_scripts(bench: Bench, away: RedisServer) -> None:
    """A store that forgot the scripts is no error."""
    away.start()
    assert "done" == bench.get(bench.job("store_raise").delay(bench.tag))
    with redis.Redis.from_url(away.url()) as client:
        client.script_flush()
    assert "done" == bench.get(bench.job("store_raise").delay(bench.tag))


@pytest.mark.parametrize("name", ["store_run", "store_retry", "store_raise"])
def test_wrong_type_always_raises(bench: Bench, own_store: RedisServer, name: str) -> None:
    """Somebody else's data under the lock key is no outage: it is an error under any setting."""
    with redis.Redis.from_url(own_store.url()) as client:
        client.rpush(bench.key(name), "not", "ours")
        client.expire(bench.key(name), 60)
        error = bench.error(bench.job(name).delay(bench.tag))
        assert "Store" in type(error).__name__
        assert [b"not", b"ours"] == client.lrange(bench.key(name), 0, -1)
    assert [] == bench.starts()


class TestWhileABodyRuns:
    def test_store_that_lost_the_key(self, bench: Bench, own_store: RedisServer) -> None:
        """A key that vanished is taken again by the next renewal, with a WARNING, and not lost."""
        holder = bench.hold("skip_short")
        key = bench.key("skip_short")
        with redis.Redis.from_url(own_store.url()) as client:
            assert 1 == client.delete(key)
            until(lambda: client.exists(key), "the key is there again", 2.0)
        assert holder.id == bench.job("skip_short").lock_holder(bench.tag).task_id
        assert 1 == len(bench.worker.wait_for_lines(": WARNING/", key))
        assert bench.get(bench.job("skip_short").delay(bench.tag)) is None
        bench.let_go()
        assert "held" == bench.get(holder)
        assert [] == bench.lock_signals(key, "lock_lost")
        assert not bench.is_locked("skip_short")

    def test_restarted_store(self, bench: Bench, own_store: RedisServer) -> None:
        """So it is after a restart that lost all data, scripts and connections, within the TTL."""
        holder = bench.hold("skip_short")
        own_store.stop()
        own_store.start()
        until(lambda: bench.is_locked("skip_short"), "the key is there again", 2.0)
        bench.let_go()
        assert "held" == bench.get(holder)
        assert [] == bench.lock_signals(bench.key("skip_short"), "lock_lost")
        assert not bench.is_locked("skip_short")

    def test_short_outage(self, bench: Bench, own_store: RedisServer) -> None:
        """A store that does not answer for less than the TTL costs no lease."""
        holder = bench.hold("skip_short", acts=["hold_watching", "return"])
        for _ in range(2):
            own_store.pause()
            time.sleep(1.0)
            own_store.resume()
            time.sleep(0.8)
        bench.let_go()
        assert "watched" == bench.get(holder)
        assert [] == bench.lock_signals(bench.key("skip_short"), "lock_lost")
        assert [] == bench.events("not-held")

    def test_long_outage(self, bench: Bench, away: RedisServer) -> None:
        """Past the deadline the lease is lost, told once, for good; the result is untouched."""
        away.start()
        holder = bench.hold("skip_short", acts=["hold_watching", "return"])
        away.stop()
        key = bench.key("skip_short")
        until(lambda: bench.lock_signals(key, "lock_lost"), "lock_lost", 4.0)
        seen = bench.wait_for("not-held", timeout=1.0)
        assert 1.0 < seen["at"] - bench.starts()[0]["at"] < 2.3
        away.start()
        time.sleep(1.5)
        bench.let_go()
        assert "watched" == bench.get(holder)
        assert 1 == len(bench.lock_signals(key, "lock_lost"))
        assert not bench.is_locked("skip_short")

    def test_long_outage_told_to_the_body(self, bench: Bench, away: RedisServer) -> None:
        """Under raise the body ends with LockLost."""
        away.start()
        holder = bench.hold("told")
        away.stop()
        assert "LockLost" == type(bench.error(holder)).__name__
        assert "LockLost" == bench.events("error")[0]["error"]


def test_outage_is_never_autoretried(bench: Bench, away: RedisServer) -> None:
    """autoretry_for=(Exception,) does not turn StoreUnavailable into a retry."""
    result = bench.job("store_auto").delay(bench.tag)
    assert isinstance(bench.error(result), StoreUnavailable)
    bench.settle(result.id)
    assert [] == bench.signals(result.id, "task_retry")
