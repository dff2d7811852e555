"""Row 15: an error that nobody expects in the renewal thread, out of our own code."""

from __future__ import annotations

import pytest

from tests.faults.harness import Bench
from tests.servers import until

TTL = 3.0


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_renewal_goes_on(pool: str, error: str) -> None:
    """It is logged, the thread goes on, and a body of four TTLs keeps its lease."""
    with Bench(ttl=TTL, faults_renewal=error) as bench:
        worker = bench.worker(pool)
        result = bench.send("skip", "a", ["sleep", 4 * TTL], expect="once")
        body = bench.body("a")
        bench.wait("renewal broken")
        assert "slept" == result.get(timeout=30)
        until(lambda: "Renewal of locks met an error and goes on" in worker.process.output(), "the error is logged")
        assert not bench.ledger.events("lost")
        bench.gone(body)
        # A prefork worker's main process would keep the lease alone: only what the body's process sends shows its thread.
        own = bench.ledger.events("store", verb="renew", run=body["run"], own=True)
        assert len(own) >= 4, "the thread renews no more"
        bench.settle()
