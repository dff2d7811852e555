"""Faults 28, 29 and 48: many duplicates of one call at once."""

from __future__ import annotations

import pytest

from tests.faults.harness import WorkerEnvironment, now, side_by_side, since
from tests.faults.matrix import LATE
from tests.servers import until

COPIES = 200
#: No worker consumes this queue until all messages are in it.
QUEUE = "storm"


@pytest.mark.parametrize("name", ["skip", "raise"])
def test_storm(name: str) -> None:
    """One of 200 duplicates on 4 workers runs; all others end as their policy says, and none hangs."""
    with WorkerEnvironment(ttl=20) as env:
        workers = [env.start(pool, 4) for pool in ("prefork", "prefork", "threads", "gevent")]
        side_by_side(*[lambda worker=worker: worker.ready(env.app) for worker in workers])
        results = [env.send(name, "a", ["hold"], queue=QUEUE) for _ in range(COPIES)]
        _consume(env)
        body = env.body("a")
        until(lambda: len(env.ledger.events("duplicate")) == COPIES - 1, "all others are duplicates", 60, 0.1)
        env.go("a")
        states = [_state(result.id, env) for result in results]
        ended = "SUCCESS" if name == "skip" else "FAILURE"
        assert sorted(["SUCCESS"] + [ended] * (COPIES - 1)) == sorted(states)
        assert 1 == len(env.ledger.events("start"))
        last = env.ledger.events("duplicate")[-1]
        env.measured(f"28 storm of {COPIES}, {name}: all decided after", 30, since(body, last["at"]))
        env.finish()


def _consume(env: WorkerEnvironment) -> None:
    """Let all workers consume the full queue at once, so that they compete for the lock."""
    assert not env.ledger.events("start")
    _add_queue(env)


def _add_queue(env: WorkerEnvironment) -> None:
    nodes = [worker.node for worker in env.workers]
    replies = env.app.control.add_consumer(QUEUE, destination=nodes, reply=True, timeout=LATE)
    assert sorted(nodes) == sorted(node for reply in replies for node in reply)


def _state(task_id: str, env: WorkerEnvironment) -> str:
    result = env.app.AsyncResult(task_id)
    return until(lambda: result.state in ("SUCCESS", "FAILURE") and result.state, "an end", LATE)


def test_storm_of_retries() -> None:
    """All 200 messages run, one at a time, with one acquire for each delivery."""
    with WorkerEnvironment(ttl=20) as env:
        workers = [env.start(pool, 4) for pool in ("prefork", "prefork", "threads", "gevent")]
        side_by_side(*[lambda worker=worker: worker.ready(env.app) for worker in workers])
        env.know_scripts()
        results = [env.send("retry", "a", ["sleep", 0.02], expect="once", queue=QUEUE) for _ in range(COPIES)]
        _consume(env)
        for result in results:
            assert "slept" == result.get(timeout=100)
        first, last = env.ledger.events("start")[0], env.ledger.events("end")[-1]
        env.measured(f"29 storm of {COPIES}, retry: all have run after", 100, since(first, last["at"]))
        env.finish()
        acquires = [e for e in env.ledger.events("store", verb="acquire") if e.get("sent")]
        deliveries = len(env.ledger.events("duplicate")) + len(results)
        unanswered = len(env.ledger.events("store error"))  # on a busy machine: the delivery is then retried
        assert deliveries <= len(acquires) <= deliveries + unanswered


#: Duplicates of each policy that uses the line, or follows.
FEWER = 40


def test_storm_in_line() -> None:
    """Of 40 duplicates at once under each policy: all run under wait, one under run_once_more and replace, none under join."""
    names = ("wait", "once-more", "latest", "replace", "join")
    with WorkerEnvironment(ttl=20) as env:
        workers = [env.start(pool, 6) for pool in ("prefork", "threads", "threads")]
        side_by_side(*[lambda worker=worker: worker.ready(env.app) for worker in workers])
        for name in names:
            env.send(name, name, ["hold"], expect="run")
        first = {name: env.body(name) for name in names}
        results = {
            name: [env.send(name, name, ["sleep", 0.02], expect="any", queue=QUEUE) for _ in range(FEWER)]
            for name in names
        }
        _add_queue(env)
        until(lambda: len(_met(env)) == FEWER * len(names), "all have met the holder", 60, 0.1)
        begin = now()
        for name in names:
            env.go(name)
        ends = {name: sorted(str(result.get(timeout=60)) for result in some) for name, some in results.items()}
        env.measured(f"48 storm of {FEWER} in line: all have ended after the holder", 60, now() - begin)
        once = ["None"] * (FEWER - 1) + ["slept"]
        ran = {"wait": ["slept"] * FEWER, "join": ["held"] * FEWER}
        assert {name: ran.get(name, once) for name in names} == ends
        assert {name: 1 + ends[name].count("slept") for name in names} == {
            name: len(env.ledger.events("start", tag=name)) for name in first
        }
        env.finish()


def _met(env: WorkerEnvironment) -> set[str]:
    return {event["task_id"] for event in env.ledger.events("duplicate")}
