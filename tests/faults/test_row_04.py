"""Row 4: ``revoke(terminate=True)``; a body that swallows it keeps its lease for as long as it runs."""

from __future__ import annotations

import pytest

from tests.faults.harness import Bench, since

SOON = 1.0


@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_terminated(number: str) -> None:
    """The lease is freed once the child is over, long before its TTL."""
    with Bench(ttl=40) as bench:
        bench.worker()
        result = bench.send("skip", "a", ["sleep", 60])
        body = bench.body("a")
        bench.app.control.revoke(result.id, terminate=True, signal=f"SIG{number}")
        freed = since(bench.end(body), bench.gone(body))
        bench.measured(f"4 revoked, {number}: lease freed after the body", SOON, freed)
        assert bench.send("skip", "a", ["sleep"], expect="once").get(timeout=10) == "slept"
        bench.settle()


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_terminated_greenlet(pool: str) -> None:
    """The lease is freed with the greenlet."""
    with Bench(ttl=40) as bench:
        bench.worker(pool)
        result = bench.send("skip", "a", ["sleep", 60])
        body = bench.body("a")
        bench.app.control.revoke(result.id, terminate=True)
        bench.measured(f"4 revoked, {pool}: lease freed after the body", SOON, since(bench.end(body), bench.gone(body)))
        bench.settle()


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_swallowed(pool: str) -> None:
    """The state is REVOKED and the body goes on for three TTLs: nobody else starts meanwhile; then the lease is freed."""
    ttl = 3.0
    with Bench(ttl=ttl) as bench:
        bench.worker(pool)
        result = bench.send("retry", "a", ["swallow", 3 * ttl])
        body = bench.body("a")
        bench.wait("swallowing")
        bench.app.control.revoke(result.id, terminate=True, signal="SIGTERM")
        bench.wait("swallowed")
        again = bench.send("retry", "a", ["sleep"], expect="once")
        end = bench.end(body)
        assert since(body, end["at"]) >= 3 * ttl - 0.1
        freed = since(end, bench.gone(body))
        bench.measured(f"4 revoked and swallowed, {pool}: lease freed after the body", SOON, freed)
        assert "slept" == again.get(timeout=10)
        bench.settle()
