"""Faults 1 and 2: a prefork child is killed. Its worker releases the lease, whatever the TTL."""

from __future__ import annotations

from tests.faults.harness import CHILD_BOUND, WorkerEnvironment, kind_of, since
from tests.faults.matrix import LATE
from tests.servers import RabbitMQServer, until


def test_killed_child(broker: str | RabbitMQServer) -> None:
    """The lease of a killed child is released within 6 s, with a TTL of 40 s, and the next duplicate runs."""
    with WorkerEnvironment(ttl=40, broker=broker) as env:
        env.worker(concurrency=2)
        env.send("skip", "a", ["hold"])
        body = env.body("a")
        waiting = env.send("retry", "b", ["hold"], expect="any")
        second = env.body("b")
        assert env.held(body) or until(lambda: env.held(body), "the lease is seen")
        fault = env.kill_child(body["pid"])
        env.measured(f"1 child killed, {kind_of(broker)}: lease freed", CHILD_BOUND, since(fault, env.gone(body)))
        again = env.send("skip", "a", ["sleep"], expect="once")
        env.measured(
            f"1 child killed, {kind_of(broker)}: next run starts",
            CHILD_BOUND + 2,
            since(fault, env.body("a", 2)["at"]),
        )
        assert "slept" == again.get(timeout=LATE)
        assert env.held(second), "another child's lease was touched"
        env.go("b")
        assert "held" == waiting.get(timeout=LATE)
        env.finish()


def test_redelivery(broker: str | RabbitMQServer) -> None:
    """With acks_late and reject_on_worker_lost the redelivered message runs to its end once, long before the TTL."""
    with WorkerEnvironment(ttl=40, broker=broker) as env:
        env.worker(concurrency=2)
        result = env.send("late", "a", ["hold"], ["sleep", 0.5], expect="once")
        body = env.body("a")
        fault = env.kill_child(body["pid"])
        again = env.body("a", 2)
        env.measured(
            f"1 child killed, late ack, {kind_of(broker)}: runs again", CHILD_BOUND + 2, since(fault, again["at"])
        )
        assert "slept" == result.get(timeout=LATE)
        assert 2 == len(env.ledger.events("start", tag="a"))
        env.finish()


def test_killed_while_the_store_is_away() -> None:
    """The lease of a child that dies during an outage is released when the store is reachable again."""
    with WorkerEnvironment(ttl=40) as env:
        env.worker(concurrency=2)
        env.send("skip", "a", ["hold"])
        body = env.body("a")
        env.wait("key")
        with env.schedule.during("outage") as fault:
            env.store.pause()
            env.kill_child(body["pid"])
            env.last(4)
            env.store.resume()
        env.measured("2 child killed in an outage: freed after it", CHILD_BOUND, env.gone(body) - fault.until)
        assert "slept" == env.send("skip", "a", ["sleep"], expect="once").get(timeout=LATE)
        env.finish()
