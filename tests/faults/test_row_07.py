"""Row 7: processes that are stopped and go on: a whole worker for longer than the TTL, and a child alone."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.harness import Bench, since

TTL = 3.0
#: From waking up until the loss is known.
KNOWN = 1.5


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_whole_worker(pool: str) -> None:
    """The first ``lease.ensure()`` after waking tells of the loss; the new holder's lease is not touched by the old one."""
    with Bench(ttl=TTL) as bench:
        victim = bench.start(pool)
        bench.worker("threads", options=("-Q", "two"))
        victim.ready(bench.app)
        bench.send("retry", "a", ["ensure"])
        body = bench.body("a")
        bench.send("retry", "a", ["hold"], expect="once", queue="two")
        bench.wait("ensured", tag="a")
        with bench.stopped(victim) as fault:
            second = bench.body("a", 2)
            bench.measured(f"7 worker stopped, {pool}: next run starts", TTL + 1, since(fault, second["at"]))
            bench.last(2 * TTL, fault.at)
        failed = bench.wait("ensure failed", KNOWN * 2)
        bench.measured(f"7 worker stopped, {pool}: ensure() raises after waking", KNOWN, failed["at"] - fault.until)
        asked = [event["asked"] for event in bench.ledger.events("ensured", tag="a")]
        assert asked, "ensure() never said that the lease is held"
        assert [] == [at for at in asked if at > fault.at + TTL], "ensure() says that the lease is held"
        bench.wait("lost", run=body["run"])
        bench.stay_held(TTL, second)
        bench.go("a")
        bench.settle()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_whole_worker_is_interrupted(pool: str) -> None:
    """Under ``on_lock_lost="raise"`` a body that asks nobody is interrupted too."""
    with Bench(ttl=TTL, singleton_on_lock_lost="raise") as bench:
        victim = bench.start(pool)
        bench.worker("threads", options=("-Q", "two"))
        victim.ready(bench.app)
        bench.send("retry", "a", ["hold", "never"])
        body = bench.body("a")
        bench.send("retry", "a", ["sleep", TTL + 2], expect="once", queue="two")
        with bench.stopped(victim) as fault:
            bench.body("a", 2)
            bench.last(1)
        end = bench.end(body)
        assert "LockLost" == end["how"]
        bench.measured(f"7 worker stopped, {pool}: LockLost raised after waking", KNOWN, end["at"] - fault.until)
        bench.settle()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_over_at_waking(pool: str) -> None:
    """A body that is over as soon as its worker wakes up, before any renewal, does not free the new holder's lease."""
    with Bench(ttl=TTL) as bench:
        victim = bench.start(pool)
        bench.worker("threads", options=("-Q", "two"))
        victim.ready(bench.app)
        bench.send("retry", "a", ["keep-gil", TTL + 1.5])
        body = bench.body("a")
        bench.send("retry", "a", ["hold"], expect="once", queue="two")
        with bench.stopped(victim) as fault:
            second = bench.body("a", 2)
            bench.last(TTL + 2, fault.at)
        bench.end(body)
        bench.stay_held(TTL + 1, second)
        bench.go("a")
        bench.settle()


def test_child_alone() -> None:
    """A child that is stopped for three TTLs keeps its lease: its main process renews it. Nobody else runs."""
    with Bench(ttl=TTL) as bench:
        bench.worker(concurrency=2)
        bench.send("retry", "a", ["hold"], expect="one attempt")
        body = bench.body("a")
        os.kill(body["pid"], signal.SIGSTOP)
        again = bench.send("retry", "a", ["sleep"], expect="once")
        bench.wait("duplicate")
        bench.stay_held(3 * TTL, body)
        os.kill(body["pid"], signal.SIGCONT)
        bench.stay_held(1, body)
        bench.go("a")
        assert "slept" == again.get(timeout=10)
        bench.settle()
