"""Faults 11 and 12: processes that are stopped and continue: a whole worker for longer than the TTL, or one child."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.harness import WorkerEnvironment, since
from tests.faults.matrix import LATE

TTL = 3.0
#: Bound in seconds from the end of the stop until the loss is known.
KNOWN = 1.5


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_whole_worker(pool: str) -> None:
    """The first ``lease.ensure()`` after a stop raises LockLost, and the old holder does not touch the new lease."""
    with WorkerEnvironment(ttl=TTL) as env:
        victim = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        victim.ready(env.app)
        env.send("retry", "a", ["ensure"])
        body = env.body("a")
        env.send("retry", "a", ["hold"], expect="once", queue="two")
        env.wait("ensured", tag="a")
        with env.stopped(victim) as fault:
            second = env.body("a", 2)
            env.measured(f"11 worker stopped, {pool}: next run starts", TTL + 1, since(fault, second["at"]))
            env.last(2 * TTL, fault.at)
        failed = env.wait("ensure failed", KNOWN * 2)
        env.measured(f"11 worker stopped, {pool}: ensure() raises after waking", KNOWN, failed["at"] - fault.until)
        asked = [event["asked"] for event in env.ledger.events("ensured", tag="a")]
        assert asked, "ensure() never said that the lease is held"
        assert [] == [at for at in asked if at > fault.at + TTL], "ensure() says that the lease is held"
        env.wait("lost", run=body["run"])
        env.stay_held(TTL, second)
        env.go("a")
        env.finish()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_whole_worker_is_interrupted(pool: str) -> None:
    """Under ``on_lock_lost="raise"`` a body that never calls ``ensure`` is interrupted after the stop."""
    with WorkerEnvironment(ttl=TTL, singleton_on_lock_lost="raise") as env:
        victim = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        victim.ready(env.app)
        env.send("retry", "a", ["hold", "never"])
        body = env.body("a")
        env.send("retry", "a", ["sleep", TTL + 2], expect="once", queue="two")
        with env.stopped(victim) as fault:
            env.body("a", 2)
            env.last(1)
        end = env.end(body)
        assert "LockLost" == end["how"]
        env.measured(f"11 worker stopped, {pool}: LockLost raised after waking", KNOWN, end["at"] - fault.until)
        env.finish()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_over_at_waking(pool: str) -> None:
    """A body that ends right after the stop, before any renewal, does not release the new holder's lease."""
    with WorkerEnvironment(ttl=TTL) as env:
        victim = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        victim.ready(env.app)
        env.send("retry", "a", ["keep-gil", TTL + 1.5])
        body = env.body("a")
        env.send("retry", "a", ["hold"], expect="once", queue="two")
        with env.stopped(victim) as fault:
            second = env.body("a", 2)
            env.last(TTL + 2, fault.at)
        env.end(body)
        env.stay_held(TTL + 1, second)
        env.go("a")
        env.finish()


def test_child_alone() -> None:
    """A child that is stopped for three TTLs keeps its lease, because its main process renews it. No duplicate runs."""
    with WorkerEnvironment(ttl=TTL) as env:
        env.worker(concurrency=2)
        env.send("retry", "a", ["hold"], expect="one attempt")
        body = env.body("a")
        os.kill(body["pid"], signal.SIGSTOP)
        again = env.send("retry", "a", ["sleep"], expect="once")
        env.wait("duplicate")
        env.stay_held(3 * TTL, body)
        os.kill(body["pid"], signal.SIGCONT)
        env.stay_held(1, body)
        env.go("a")
        assert "slept" == again.get(timeout=LATE)
        env.finish()
