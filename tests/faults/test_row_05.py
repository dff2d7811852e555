"""Row 5: messages revoked or expired before their start, and bodies that leave by SystemExit or MemoryError."""

from __future__ import annotations

import pytest
from celery.utils import uuid

from tests.faults.harness import Bench, since
from tests.servers import until

SOON = 1.0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_before_start(pool: str) -> None:
    """What is revoked or expires before its start asks for no lease, and leaves the holder's alone."""
    with Bench(ttl=40) as bench:
        worker = bench.worker(pool, concurrency=1)
        first = bench.send("skip", "a", ["hold"], expect="once")
        body = bench.body("a")
        beforehand = uuid()
        assert bench.app.control.revoke(beforehand, destination=[worker.node], reply=True, timeout=10)
        waiting = bench.send("skip", "b", expect="none", countdown=2)
        bench.app.control.revoke(waiting.id, destination=[worker.node], reply=True, timeout=10)
        never = [
            waiting,
            bench.send("skip", "a", expect="none", task_id=beforehand),
            bench.send("skip", "a", expect="none", countdown=1.5, expires=1),
        ]
        if pool == "prefork":  # Celery (5.7) hands all that it has received to a pool of threads, and looks no more
            fetched = bench.send("skip", "a", expect="none")
            never += [fetched, bench.send("skip", "a", expect="none", expires=1)]
            bench.app.control.revoke(fetched.id)
        bench.last(2.2)  # one expires, the other is due
        bench.go("a")
        assert "held" == first.get(timeout=10)
        for result in never:
            until(lambda result=result: result.state == "REVOKED", "revoked")
        bench.gone(body)
        bench.settle()
        assert {body["run"]} == {event["run"] for event in bench.ledger.events("store", verb="acquire")}


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
