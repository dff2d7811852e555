"""The store is unreachable, refuses calls, or has unexpected data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import chain, chord, states

from celery_singleton_lock import StoreUnavailable
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.monitor import Monitor
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.test_budget import scripts_of
from tests.overlap.test_line import enqueue
from tests.servers import RedisServer, until

StartWorker = Callable[..., LocalWorkerNode]

#: Seconds: so long that a call fails only where a test means it to.
STORE_TIMEOUT = 5.0


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url(), "singleton_lock_store_timeout": STORE_TIMEOUT}


@pytest.fixture(scope="module", params=["prefork", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def away(own_store: RedisServer) -> Iterator[RedisServer]:
    """Yield the stopped store; it is started again after the test at the latest."""
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
        """The run is postponed until the store is reachable, and keeps its own retries."""
        result = env.job("store_retry").delay(env.tag)
        env.wait_for_state(result, states.RETRY)
        assert [] == env.starts()
        away.start()
        assert "done" == env.get(result)
        assert 0 == env.starts()[0]["retries"]
        assert env.starts()[0]["protected"] is True

    def test_chain(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """A chain waits for the postponed step and continues after it."""
        last = chain(env.job("store_retry").si(env.tag), then(env))()
        env.wait_for_state(last.parent, states.RETRY)
        away.start()
        assert env.get(last).startswith("then")

    def test_chord(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """A chord waits for its postponed members."""
        job = env.job("store_retry")
        header = [job.si(env.tag), job.si(env.other_tag("other"))]
        result = chord(header)(collect(env))
        env.wait_for_state(result.parent.results[0], states.RETRY)
        away.start()
        assert ["done", "done"] == env.get(result)

    def test_cannot_publish_either(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """An early acknowledged run that cannot be published again fails, because its message is lost."""
        env.allow_publishing(False)
        result = env.job("store_retry").delay(env.tag)
        assert isinstance(env.error(result), StoreUnavailable)
        assert [] == env.starts()

    def test_cannot_publish_either_chain(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """A chain fails with a step that cannot be published again, so that no caller waits for it."""
        env.allow_publishing(False)
        last = chain(env.job("store_retry").si(env.tag), then(env))()
        assert isinstance(env.error(last.parent), StoreUnavailable)
        assert isinstance(env.error(last), StoreUnavailable)
        assert [] == env.starts()

    def test_cannot_publish_either_chord(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """A chord fails with a member that cannot be published again."""
        env.allow_publishing(False)
        job = env.job("store_retry")
        result = chord([job.si(env.tag), job.si(env.other_tag("other"))])(collect(env))
        assert isinstance(env.error(result), StoreUnavailable)
        assert [] == env.starts()

    def test_cannot_publish_either_late(self, env: WorkerEnvironment, away: RedisServer, no_publish: None) -> None:
        """A late acknowledged run that cannot be published again is requeued, and runs in the end."""
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
        """Let the worker publish again after the test."""
        yield
        env.allow_publishing(True)


class TestRun:
    def test_single(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The body runs unprotected, and its lease says so."""
        assert "done" == env.get(env.job("store_run").delay(env.tag))
        assert env.starts()[0]["protected"] is False

    def test_chain_and_chord(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """Chains and chords continue as without a lock."""
        job = env.job("store_run")
        assert env.get(chain(job.si(env.tag), then(env))()).startswith("then")
        assert ["done", "done"] == env.get(chord([job.si(env.tag)] * 2)(collect(env)))

    def test_message_in_line(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """A message in line goes on waiting: it is run once, under its lock, after the body that it waited for."""
        held = env.hold("store_run_wait")
        waiting = env.job("store_run_wait").delay(env.tag, "return")
        until(lambda: env.tickets("store_run_wait"), "the message waits")
        own_store.stop()
        try:
            env.worker.wait_for_lines(waiting.id, "could not ask for its place in line")
            until(
                lambda: [
                    one
                    for one in env.lock_signals(env.key("store_run_wait"), "store_error")
                    if one["task_id"] == waiting.id
                ],
                "the signal about its copy",
            )
        finally:
            own_store.start()
        env.let_go()
        assert ["held", "done"] == [env.get(held), env.get(waiting)]
        assert [True, True] == [start["protected"] for start in env.starts()]


class TestRaise:
    def test_single(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The run fails with StoreUnavailable."""
        assert isinstance(env.error(env.job("store_raise").delay(env.tag)), StoreUnavailable)
        assert [] == env.starts()

    def test_chain(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """The rest of the chain does not run."""
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
    """An outage is a WARNING, a line at level DEBUG for each task, and a signal, under any setting."""
    result = env.job(name).delay(env.tag)
    until(lambda: env.lock_signals(env.key(name), "store_error"), "the signal")
    event = env.lock_signals(env.key(name), "store_error")[0]
    assert result.id == event["task_id"]
    assert event["task"] == f"job.{name}"
    assert env.worker.wait_for_lines(": DEBUG/", result.id, "could not acquire its lock")
    assert env.worker.lines(": WARNING/", "The store of locks is unreachable")
    assert [] == env.worker.lines(": WARNING/", result.id)
    env.revoke(result)


@pytest.mark.parametrize("name", ["store_run", "store_raise"])
def test_frozen_store_costs_its_timeout(
    env: WorkerEnvironment, own_store: RedisServer, fresh_worker: StartWorker, pool: str, name: str
) -> None:
    """A task whose store never answers makes one call, and waits for its timeout.

    The worker has one process: another one would have to connect first, and would spend the timeout on that.
    """
    queue = fresh_worker(WorkerSpec(pool, 1)).worker_queue
    env.get(env.job(name).apply_async((env.other_tag("warm"),), queue=queue))
    with Monitor(own_store.url()) as monitor:
        own_store.pause()
        try:
            sent = time.monotonic()
            env.job(name).apply_async((env.tag,), queue=queue).get(timeout=SOON, propagate=False)
            took = time.monotonic() - sent
        finally:
            own_store.resume()

        def own() -> list[str]:
            return [command for command in monitor.commands if env.key(name) in command]

        until(lambda: "acquire" in scripts_of(own()), "the store reads what it was sent, on whichever connection first")
    assert took > STORE_TIMEOUT * 0.9
    assert 1 == len(env.lock_signals(env.key(name), "store_error"))
    assert 1 == scripts_of(own()).count("acquire"), own()


def test_frozen_store_and_hard_time_limits(env: WorkerEnvironment, pool: str, own_store: RedisServer) -> None:
    """Messages that wait in line are not ended by their time limits, for however long the store does not answer."""
    if pool != "prefork":
        pytest.skip("this pool ignores time limits")
    first = env.hold("wait_short_ttl", lock_options={"lock_ttl": 60})
    waiting = enqueue(env, "wait_short_ttl", 20, time_limit=3)
    own_store.pause()
    try:
        time.sleep(4.5)  # the fault
    finally:
        own_store.resume()
    time.sleep(4.0)  # so long that the store would forget a message without a copy
    env.let_go()
    assert "held" == env.get(first)
    assert ["done"] * 20 == [env.get(result) for result in waiting]


def test_release_does_not_touch_the_result(env: WorkerEnvironment, away: RedisServer) -> None:
    """A task whose store becomes unreachable while the body runs still succeeds."""
    away.start()
    result = env.hold("long")
    away.stop()
    env.let_go()
    assert "held" == env.get(result)


def test_restarted_store_without_its_scripts(env: WorkerEnvironment, away: RedisServer) -> None:
    """A store that lost its scripts causes no error."""
    away.start()
    assert "done" == env.get(env.job("store_raise").delay(env.tag))
    with redis.Redis.from_url(away.url()) as client:
        client.script_flush()
    assert "done" == env.get(env.job("store_raise").delay(env.tag))


@pytest.mark.parametrize("name", ["store_run", "store_retry", "store_raise"])
def test_wrong_type_always_raises(env: WorkerEnvironment, own_store: RedisServer, name: str) -> None:
    """Data of another application under the lock key fail the task under any setting, and are not changed."""
    with redis.Redis.from_url(own_store.url()) as client:
        client.rpush(env.key(name), "not", "ours")
        client.expire(env.key(name), 600)
        error = env.error(env.job(name).delay(env.tag))
        assert "Store" in type(error).__name__
        assert [b"not", b"ours"] == client.lrange(env.key(name), 0, -1)
    assert [] == env.starts()


class TestWhileABodyRuns:
    def test_store_that_lost_the_key(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """The next renewal reacquires a missing lock with a WARNING, and the lease is not lost."""
        holder = env.hold("skip_short", lock_options={"lock_ttl": 9})
        key = env.key("skip_short")
        with redis.Redis.from_url(own_store.url()) as client:
            assert 1 == client.delete(key)
            until(lambda: client.exists(key), "the key is there again")
        assert holder.id == env.job("skip_short").lock_holder(env.tag).task_id
        assert 1 == len(env.worker.wait_for_lines(": WARNING/", key))
        assert env.get(env.job("skip_short").delay(env.tag)) is None
        env.let_go()
        assert "held" == env.get(holder)
        assert [] == env.lock_signals(key, "lock_lost")
        assert not env.is_locked("skip_short")

    def test_restarted_store(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """A restart within the TTL that loses all data, scripts and connections costs no lease."""
        holder = env.hold("skip_short", lock_options={"lock_ttl": 15})
        own_store.stop()
        own_store.start()
        until(lambda: env.is_locked("skip_short"), "the key is there again")
        env.let_go()
        assert "held" == env.get(holder)
        assert [] == env.lock_signals(env.key("skip_short"), "lock_lost")
        assert not env.is_locked("skip_short")

    def test_short_outage(self, env: WorkerEnvironment, own_store: RedisServer) -> None:
        """An outage shorter than the TTL costs no lease."""
        holder = env.hold("skip_short", acts=["hold_watching", "return"], lock_options={"lock_ttl": 12})

        def count(what: str) -> int:
            return len(env.lock_signals(env.key("skip_short"), what))

        for number in (1, 2):
            own_store.pause()
            until(lambda: count("store_error") == number, "a renewal fails")  # noqa: B023
            own_store.resume()
            before = count("lock_renewed")
            until(lambda: count("lock_renewed") > before, "the lease is renewed")  # noqa: B023
        env.let_go()
        assert "supervised" == env.get(holder)
        assert [] == env.lock_signals(env.key("skip_short"), "lock_lost")
        assert [] == env.events("not-held")

    def test_long_outage(self, env: WorkerEnvironment, away: RedisServer) -> None:
        """Past the deadline the lease is lost for good and reported once; the task's result does not change."""
        away.start()
        sent = time.monotonic()
        holder = env.hold("skip_short", acts=["hold_watching", "return"])
        away.stop()
        key = env.key("skip_short")
        until(lambda: env.lock_signals(key, "lock_lost"), "lock_lost")
        assert sent + 2.0 < env.wait_for("not-held")["at"]
        away.start()
        until(lambda: env.is_locked("skip_short"), "it is reacquired")
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
