"""Row 1: a prefork child is killed; its worker sees it and frees the lease, whatever the TTL."""

from __future__ import annotations

from tests.faults.harness import CHILD_BOUND, Bench, kind_of, since
from tests.servers import RabbitMQServer, until


def test_killed_child(broker: str | RabbitMQServer) -> None:
    """The lease of a killed child is freed within 6 s though its TTL is 40 s, and the next duplicate runs."""
    with Bench(ttl=40, broker=broker) as bench:
        bench.worker(concurrency=2)
        bench.send("skip", "a", ["hold"])
        body = bench.body("a")
        waiting = bench.send("retry", "b", ["hold"], expect="any")
        second = bench.body("b")
        assert bench.held(body) or until(lambda: bench.held(body), "the lease is seen")
        fault = bench.kill_child(body["pid"])
        bench.measured(f"1 child killed, {kind_of(broker)}: lease freed", CHILD_BOUND, since(fault, bench.gone(body)))
        again = bench.send("skip", "a", ["sleep"], expect="once")
        bench.measured(
            f"1 child killed, {kind_of(broker)}: next run starts",
            CHILD_BOUND + 2,
            since(fault, bench.body("a", 2)["at"]),
        )
        assert "slept" == again.get(timeout=10)
        assert bench.held(second), "another child's lease was touched"
        bench.go("b")
        assert "held" == waiting.get(timeout=10)
        bench.settle()


def test_redelivery(broker: str | RabbitMQServer) -> None:
    """With acks_late and reject_on_worker_lost the redelivered message runs to its end, once, and long before the TTL."""
    with Bench(ttl=40, broker=broker) as bench:
        bench.worker(concurrency=2)
        result = bench.send("late", "a", ["hold"], ["sleep", 0.5], expect="once")
        body = bench.body("a")
        fault = bench.kill_child(body["pid"])
        again = bench.body("a", 2)
        bench.measured(
            f"1 child killed, late ack, {kind_of(broker)}: runs again", CHILD_BOUND + 2, since(fault, again["at"])
        )
        assert "slept" == result.get(timeout=10)
        assert 2 == len(bench.ledger.events("start", tag="a"))
        bench.settle()


def test_killed_while_the_store_is_away() -> None:
    """A child that dies during an outage is not forgotten: its lease is freed once the store is back."""
    with Bench(ttl=40) as bench:
        bench.worker(concurrency=2)
        bench.send("skip", "a", ["hold"])
        body = bench.body("a")
        bench.wait("key")
        with bench.schedule.during("outage") as fault:
            bench.store.pause()
            bench.kill_child(body["pid"])
            bench.last(4)
            bench.store.resume()
        bench.measured("1 child killed in an outage: freed after it", CHILD_BOUND, bench.gone(body) - fault.until)
        assert "slept" == bench.send("skip", "a", ["sleep"], expect="once").get(timeout=20)
        bench.settle()
