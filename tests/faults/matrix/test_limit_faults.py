"""Fault 42: one of several holders of a lock ends, and the others go on."""

from __future__ import annotations

import pytest

from tests.faults.harness import CHILD_BOUND, WorkerEnvironment, since
from tests.faults.matrix import LATE
from tests.faults.tasks import SEVERAL

TTL = 4.0


@pytest.mark.parametrize("what", ["child", "worker"])
def test_one_holder_killed(what: str) -> None:
    """The death of one of three holders lets one message start, and the two others keep their slots."""
    with WorkerEnvironment(ttl=TTL) as env:
        workers = [env.start("prefork", 2, options=("-Q", f"{number}")) for number in range(SEVERAL)]
        env.worker("threads", options=("-Q", "two"))
        bodies = []
        for number, worker in enumerate(workers):
            worker.ready(env.app)
            env.send("limit", "a", ["hold"], expect="any" if number == 1 else "once", queue=f"{number}")
            bodies.append(env.body("a", number + 1))
        waiting = [env.send("limit", "a", ["hold"], expect="once", queue="two") for _ in range(2)]
        for result in waiting:
            env.wait("duplicate", task_id=result.id)
        fault = env.kill_child(bodies[1]["pid"]) if what == "child" else env.kill(workers[1])
        fourth = env.body("a", SEVERAL + 1)
        bound = (CHILD_BOUND if what == "child" else TTL) + 1
        env.measured(f"42 one of {SEVERAL} holders killed, {what}: the next starts", bound, since(fault, fourth["at"]))
        env.stay_held(TTL, bodies[0], bodies[2], fourth)
        env.go("a")
        assert ["held", "held"] == [result.get(timeout=LATE) for result in waiting]
        env.finish()
