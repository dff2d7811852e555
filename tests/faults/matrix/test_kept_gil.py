"""Faults 13 and 14: a body keeps the GIL for four TTLs. The main process renews for it until the child is dead."""

from __future__ import annotations

import pytest

from tests.faults.harness import CHILD_BOUND, Worker, WorkerEnvironment, now, since
from tests.faults.ledger import Event
from tests.servers import until
from tests.stacks import stacks_of

#: Seconds by which a renewal is late that something keeps from being sent: other work on the machine delays it by less.
LATE = 2.0


def test_regex() -> None:
    """A lease with a TTL of 3 s is not lost, and no duplicate runs, while the child cannot renew for 12 s."""
    with WorkerEnvironment(ttl=3) as env:
        env.worker(concurrency=1)
        env.worker("threads", 2, ("-Q", "two"))
        env.send("skip", "a", ["regex", 12.0], expect="one attempt")
        body = env.body("a")
        env.wait("regex")
        copies = 0
        while not env.ledger.events("end", run=body["run"]):
            assert copies < 500, "the body never ends"  # it needs 12 s of a processor, however many others share that
            env.send("skip", "a", ["sleep"], queue="two")
            copies += 1
            env.last(0.5)
        end = env.end(body)
        env.measured("13 GIL held: the body took", 260, since(body, end["at"]), at_least=12)
        env.gone(body)
        env.finish()
        assert not env.ledger.events("lost")
        others = [start["at"] for start in env.ledger.events("start", tag="a") if start["run"] != body["run"]]
        assert [] == [at for at in others if at < end["at"]]
        assert len(others) <= 1  # one duplicate may be delivered after the end


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_never_yields(pool: str) -> None:
    """A body that blocks all other greenlets for three TTLs keeps its lease, because a native thread renews it."""
    with WorkerEnvironment(ttl=3) as env:
        first = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        first.ready(env.app)
        env.send("retry", "a", ["spin", 9.0], expect="one attempt")
        body = env.body("a")
        env.send("retry", "a", ["sleep"], expect="once", queue="two")
        _print_stacks_if_late(env, first, body)
        env.body("a", 2)
        env.finish()
        assert not env.ledger.events("lost")


def _print_stacks_if_late(env: WorkerEnvironment, worker: Worker, body: Event) -> None:
    """Wait until a body ends. Once a renewal of its lease is late, print the stacks of its worker, which show a rare stall."""

    def is_late() -> bool:
        calls = env.ledger.events("store", run=body["run"])
        return now() > max([body["at"], *(call["at"] for call in calls)]) + env.limits.ttl / 3 + LATE

    def is_over() -> bool:
        return bool(env.ledger.events("end", run=body["run"]))

    until(lambda: is_over() or is_late(), "the body ends")
    if not is_over():
        print(f"a renewal of {body['run']} is {LATE:g} s late:{stacks_of(worker.process)}")
    env.end(body)


def test_killed_within() -> None:
    """The lease of a child that is killed while it keeps the GIL is released within 6 s, with a TTL of 40 s."""
    with WorkerEnvironment(ttl=40) as env:
        env.worker(concurrency=1)
        env.send("skip", "a", ["regex", 30.0])
        body = env.body("a")
        env.wait("regex")
        env.last(1)
        fault = env.kill_child(body["pid"])
        env.measured("14 GIL held, child killed: lease freed", CHILD_BOUND, since(fault, env.gone(body)))
        env.finish()


def test_renewal_ends_with_the_child() -> None:
    """A lease that the main process renewed is released within 6 s of the child's death and is not renewed afterwards."""
    with WorkerEnvironment(ttl=3) as env:
        env.worker(concurrency=2)
        env.send("skip", "a", ["regex", 30.0])
        body = env.body("a")
        env.wait("regex")
        until(lambda: len(_by_main_process(env)) >= 2, "renewed by the main process")
        fault = env.kill_child(body["pid"])
        freed = env.gone(body)
        env.measured("14 GIL held, TTL 3 s, child killed: lease freed", CHILD_BOUND, since(fault, freed))
        env.last(4)
        assert [] == [one for one in _by_main_process(env) if one["at"] > freed + 1]  # one may be under way
        env.finish()


def _by_main_process(env: WorkerEnvironment) -> list[Event]:
    """Return the renewals that a main process has sent for its children."""
    return env.ledger.events("store", verb="renew", own=False)
