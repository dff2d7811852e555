"""Row 8: a body that holds the GIL for four TTLs; and the main process that renews for it must know when to stop."""

from __future__ import annotations

import pytest

from tests.faults.harness import CHILD_BOUND, Bench, since
from tests.faults.ledger import Event
from tests.servers import until


def test_regex() -> None:
    """The lease is not lost, and no duplicate runs, though the child cannot renew for 12 s with a TTL of 3 s."""
    with Bench(ttl=3) as bench:
        bench.worker(concurrency=1)
        bench.worker("threads", 2, ("-Q", "two"))
        bench.send("skip", "a", ["regex", 12.0], expect="one attempt")
        body = bench.body("a")
        bench.wait("regex")
        copies = 0
        while not bench.ledger.events("end", run=body["run"]):
            assert copies < 200, "the body never ends"  # it needs up to 24 s of a processor that others use too
            bench.send("skip", "a", ["sleep"], queue="two")
            copies += 1
            bench.last(0.5)
        end = bench.end(body)
        bench.measured("8 GIL held: the body took", 105, since(body, end["at"]), at_least=12)
        bench.gone(body)
        bench.settle()
        assert not bench.ledger.events("lost")
        others = [start["at"] for start in bench.ledger.events("start", tag="a") if start["run"] != body["run"]]
        assert [] == [at for at in others if at < end["at"]]
        assert len(others) <= 1  # one copy may come after the end


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_never_yields(pool: str) -> None:
    """A body that computes for three TTLs and lets no other greenlet run keeps its lease: a native thread renews it."""
    with Bench(ttl=3) as bench:
        first = bench.start(pool)
        bench.worker("threads", options=("-Q", "two"))
        first.ready(bench.app)
        bench.send("retry", "a", ["spin", 9.0], expect="one attempt")
        body = bench.body("a")
        bench.send("retry", "a", ["sleep"], expect="once", queue="two")
        bench.end(body)
        bench.body("a", 2)
        bench.settle()
        assert not bench.ledger.events("lost")


def test_killed_within() -> None:
    """A child that is killed while it holds the GIL is not renewed for; its lease is freed within 6 s, with a TTL of 40 s."""
    with Bench(ttl=40) as bench:
        bench.worker(concurrency=1)
        bench.send("skip", "a", ["regex", 30.0])
        body = bench.body("a")
        bench.wait("regex")
        bench.last(1)
        fault = bench.kill_child(body["pid"])
        bench.measured("8 GIL held, child killed: lease freed", CHILD_BOUND, since(fault, bench.gone(body)))
        bench.settle()


def test_renewal_ends_with_the_child() -> None:
    """With a short TTL, which the main process has been renewing, the same holds, and nothing is renewed afterwards."""
    with Bench(ttl=3) as bench:
        bench.worker(concurrency=2)
        bench.send("skip", "a", ["regex", 30.0])
        body = bench.body("a")
        bench.wait("regex")
        until(lambda: len(_by_main_process(bench)) >= 2, "renewed by the main process")
        fault = bench.kill_child(body["pid"])
        bench.measured("8 GIL held, TTL 3 s, child killed: lease freed", CHILD_BOUND, since(fault, bench.gone(body)))
        bench.last(4)
        bench.settle()


def _by_main_process(bench: Bench) -> list[Event]:
    """Return the renewals that a main process has sent for its children."""
    return bench.ledger.events("store", verb="renew", own=False)
