"""Faults 6 and 7: messages revoked or expired before their start, and bodies that raise SystemExit or MemoryError."""

from __future__ import annotations

import pytest
from celery.utils import uuid

from tests.faults.harness import WorkerEnvironment, since
from tests.faults.matrix import LATE
from tests.servers import until

SOON = 1.0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_before_start(pool: str) -> None:
    """A message that is revoked or expires before its start requests no lease and does not touch the holder's."""
    with WorkerEnvironment(ttl=40) as env:
        worker = env.worker(pool, concurrency=1)
        first = env.send("skip", "a", ["hold"], expect="once")
        body = env.body("a")
        beforehand = uuid()
        assert env.app.control.revoke(beforehand, destination=[worker.node], reply=True, timeout=LATE)
        waiting = env.send("skip", "b", expect="none", countdown=2)
        env.app.control.revoke(waiting.id, destination=[worker.node], reply=True, timeout=LATE)
        never = [
            waiting,
            env.send("skip", "a", expect="none", task_id=beforehand),
            env.send("skip", "a", expect="none", countdown=1.5, expires=1),
        ]
        if pool == "prefork":  # Celery (5.7) hands all messages to a thread pool at once and does not check them again
            fetched = env.send("skip", "a", expect="none")
            never += [fetched, env.send("skip", "a", expect="none", expires=1)]
            env.app.control.revoke(fetched.id)
        env.last(2.2)  # one message expires, the other becomes due
        env.go("a")
        assert "held" == first.get(timeout=LATE)
        for result in never:
            until(lambda result=result: result.state == "REVOKED", "revoked")
        env.gone(body)
        env.finish()
        assert {body["run"]} == {event["run"] for event in env.ledger.events("store", verb="acquire")}


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
@pytest.mark.parametrize("act", ["exit", "memory"])
def test_body_leaves(pool: str, act: str) -> None:
    """The lease is released with the body, also where the process ends or Celery never reports the end."""
    with WorkerEnvironment(ttl=40) as env:
        env.worker(pool)
        second = env.worker("threads", options=("-Q", "two"))
        env.send("skip", "a", [act])
        body = env.body("a")
        freed = since(env.end(body), env.gone(body))
        env.measured(f"7 {'SystemExit' if act == 'exit' else 'MemoryError'}, {pool}: freed after the body", SOON, freed)
        assert second.process.running
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once", queue="two").get(timeout=LATE)
        env.finish()
