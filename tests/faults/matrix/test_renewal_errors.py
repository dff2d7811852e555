"""Fault 32: an unexpected error in a thread that renews, raised in the library's own code."""

from __future__ import annotations

import pytest

from tests.faults.harness import WorkerEnvironment
from tests.faults.matrix import LATE
from tests.servers import until

TTL = 3.0


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_renewal_goes_on(pool: str, error: str) -> None:
    """The error is logged, the renewal thread continues, and a body of four TTLs keeps its lease."""
    with WorkerEnvironment(ttl=TTL, faults_renewal=error) as env:
        worker = env.worker(pool)
        result = env.send("skip", "a", ["sleep", 4 * TTL], expect="once")
        body = env.body("a")
        env.wait("renewal broken")
        assert "slept" == result.get(timeout=LATE)
        until(
            lambda: "A background thread of locks met an error and goes on" in worker.process.output(),
            "the error is logged",
        )
        assert not env.ledger.events("lost")
        env.gone(body)
        # The main process of a prefork worker renews too: only renewals of the body's own process prove that its thread runs.
        own = env.ledger.events("store", verb="renew", run=body["run"], own=True)
        assert len(own) >= 4, "the thread renews no more"
        env.finish()


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_watch_goes_on(error: str) -> None:
    """The main process continues to renew after an error, for a body that keeps the GIL for more than two TTLs."""
    with WorkerEnvironment(ttl=TTL, faults_watch=error) as env:
        worker = env.start(concurrency=1)
        env.worker("threads", options=("-Q", "two"))
        worker.ready(env.app)
        env.send("retry", "a", ["keep-gil", 2.5 * TTL], expect="one attempt")
        body = env.body("a")
        second = env.send("retry", "a", ["sleep"], expect="once", queue="two")
        env.stay_held(2 * TTL, body)
        env.end(body)
        assert "slept" == second.get(timeout=LATE)
        assert "A background thread of locks met an error and goes on" in worker.process.output()
        broken = [event for event in env.ledger.events("watch broken") if event["pid"] == worker.process.pid]
        assert len(broken) >= 2
        assert not env.ledger.events("lost")
        env.finish()
