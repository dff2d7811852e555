"""Fault 5: ``revoke(terminate=True)``. A body that swallows the exception keeps its lease as long as it runs."""

from __future__ import annotations

import pytest

from tests.faults.harness import WorkerEnvironment, since
from tests.faults.matrix import LATE

SOON = 1.0


@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_terminated(number: str) -> None:
    """The lease is released when the child has exited, long before its TTL."""
    with WorkerEnvironment(ttl=40) as env:
        env.worker()
        result = env.send("skip", "a", ["sleep", 60])
        body = env.body("a")
        env.app.control.revoke(result.id, terminate=True, signal=f"SIG{number}")
        freed = since(env.end(body), env.gone(body))
        env.measured(f"5 revoked, {number}: lease freed after the body", SOON, freed)
        assert env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE) == "slept"
        env.finish()


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_terminated_greenlet(pool: str) -> None:
    """The lease is released when the greenlet ends."""
    with WorkerEnvironment(ttl=40) as env:
        env.worker(pool)
        result = env.send("skip", "a", ["sleep", 60])
        body = env.body("a")
        env.app.control.revoke(result.id, terminate=True)
        env.measured(f"5 revoked, {pool}: lease freed after the body", SOON, since(env.end(body), env.gone(body)))
        env.finish()


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_swallowed(pool: str) -> None:
    """A revoked body that continues for three TTLs keeps its lease until it ends; no other delivery starts meanwhile."""
    ttl = 3.0
    with WorkerEnvironment(ttl=ttl) as env:
        env.worker(pool)
        result = env.send("retry", "a", ["swallow", 3 * ttl])
        body = env.body("a")
        env.wait("swallowing")
        env.app.control.revoke(result.id, terminate=True, signal="SIGTERM")
        env.wait("swallowed")
        again = env.send("retry", "a", ["sleep"], expect="once")
        end = env.end(body)
        assert since(body, end["at"]) >= 3 * ttl - 0.1
        freed = since(end, env.gone(body))
        env.measured(f"5 revoked and swallowed, {pool}: lease freed after the body", SOON, freed)
        assert "slept" == again.get(timeout=LATE)
        env.finish()
