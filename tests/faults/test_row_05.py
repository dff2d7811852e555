"""Row 5: messages revoked or expired before their start, and bodies that leave by SystemExit or MemoryError."""

from __future__ import annotations

import pytest

from tests.faults.harness import Bench, since
from tests.servers import until

SOON = 1.0


def test_before_start() -> None:
    """What is revoked or expires before its start takes no lease, and leaves the holder's alone."""
    with Bench(ttl=40) as bench:
        bench.worker(concurrency=1)
        first = bench.send("skip", "a", ["hold"], expect="once")
        body = bench.body("a")
        revoked = bench.send("skip", "a", expect="none")
        expired = bench.send("skip", "a", expect="none", expires=1)
        other = bench.send("skip", "b", expect="none", countdown=2)
        for result in (revoked, other):
            bench.app.control.revoke(result.id)
        bench.last(1.5)  # one expires
        bench.go("a")
        assert "held" == first.get(timeout=10)
        for result in (revoked, expired, other):
            until(lambda result=result: result.state == "REVOKED", "revoked")
        assert 1 == len(bench.ledger.events("key")) and bench.gone(body)
        bench.settle()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
@pytest.mark.parametrize("act", ["exit", "memory"])
def test_body_leaves(pool: str, act: str) -> None:
    """The lease is freed with the body, also where the child or a solo worker ends, or Celery itself never tells of the end."""
    with Bench(ttl=40) as bench:
        bench.worker(pool)
        second = bench.worker("threads", options=("-Q", "two"))
        bench.send("skip", "a", [act])
        body = bench.body("a")
        freed = since(bench.end(body), bench.gone(body))
        bench.measured(
            f"5 {'SystemExit' if act == 'exit' else 'MemoryError'}, {pool}: freed after the body", SOON, freed
        )
        assert second.process.running
        assert "slept" == bench.send("skip", "a", ["sleep"], expect="once", queue="two").get(timeout=10)
        bench.settle()
