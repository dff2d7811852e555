"""Row 9: the same message delivered twice at once. The second delivery waits to see how the first ends."""

from __future__ import annotations

import pytest
from celery import chain

from tests.faults.harness import Bench, kind_of, since
from tests.faults.ledger import Event
from tests.servers import RabbitMQServer, until

#: A message comes back after 2 s though its body still runs, and within seconds.
SWEEP = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}


def _bench(broker: str | RabbitMQServer, visibility: float = 2) -> Bench:
    """Return one whose workers store no STARTED: Celery (5.7) reads before it writes, and so may undo a SUCCESS of just then."""
    conf = {"task_track_started": False}
    if isinstance(broker, str):
        return Bench(ttl=20, broker_transport_options={**SWEEP, "visibility_timeout": visibility}, **conf)
    return Bench(ttl=20, broker=broker, broker_proxied=True, **conf)


def _deliver_twice(bench: Bench, broker: str | RabbitMQServer, *bodies: Event) -> None:
    """Bring about a second delivery of messages whose bodies hold, and wait until each has asked for its lock."""
    if isinstance(broker, RabbitMQServer):
        bench.broker_proxy.cut()
    until(lambda: all(_deliveries(bench, body) >= 2 for body in bodies), "second deliveries ask", 30, 0.1)


def _deliveries(bench: Bench, body: Event) -> int:
    asked = bench.ledger.events("store", verb="acquire", key=body["key"])
    return len({event["run"] for event in asked})


@pytest.mark.parametrize("workers", [1, 2])
def test_first_succeeds(broker: str | RabbitMQServer, workers: int) -> None:
    """The second is dropped; the body ran once, and the next step of the chain was published once."""
    with _bench(broker) as bench:
        for worker in [bench.start(concurrency=2) for _ in range(workers)]:
            worker.ready(bench.app)
        late, following = bench.app.tasks["late"], bench.app.tasks["next"]
        result = chain(late.s("a", acts=[["hold"]]), following.s("a")).apply_async()
        bench.expect(result.parent.id, "one attempt")
        _deliver_twice(bench, broker, bench.body("a"))
        bench.go("a")
        assert "held" == result.get(timeout=30)
        _all_copies_end(bench, kind_of(broker), 1)
        assert 1 == len(bench.ledger.events("next"))
        assert "SUCCESS" == result.parent.state
        bench.settle()


def test_first_fails(broker: str | RabbitMQServer) -> None:
    """The second runs once the first has failed, not before, and the chain goes on after it."""
    with _bench(broker) as bench:
        first = _held_twice(bench, broker, "hold-boom")
        bench.go("a")
        bench.end(first)
        bench.body("a", 2)
        _chain_goes_on(bench, broker)


def test_first_dies(broker: str | RabbitMQServer) -> None:
    """The second delivery runs once the first one's process is dead, and the chain goes on after it."""
    with _bench(broker) as bench:
        first = _held_twice(bench, broker, "hold")
        killed = bench.kill_child(first["pid"])
        second = bench.body("a", 2)
        bench.measured(f"9 first delivery killed, {kind_of(broker)}: the second runs", 10, since(killed, second["at"]))
        _chain_goes_on(bench, broker)


def _held_twice(bench: Bench, broker: str | RabbitMQServer, act: str) -> Event:
    """Give a body that does this act, and whose message, the first of a chain, has been delivered a second time."""
    bench.worker(concurrency=2)
    late, following = bench.app.tasks["late"], bench.app.tasks["next"]
    result = chain(late.s("a", acts=[[act], ["sleep", 0.5]]), following.s("a")).apply_async()
    bench.expect(result.parent.id, "run")
    first = bench.body("a")
    _deliver_twice(bench, broker, first)
    return first


def _chain_goes_on(bench: Bench, broker: str | RabbitMQServer) -> None:
    """See to it that the next step is published once, and two bodies in all have run."""
    bench.wait("next")
    _all_copies_end(bench, kind_of(broker), 2)
    assert 1 == len(bench.ledger.events("next"))
    bench.settle()


def test_no_duplicate_of_itself() -> None:
    """Under the policies skip and raise, too, the second delivery waits, is dropped after a success and runs after a failure."""
    with _bench("redis", visibility=6) as bench:  # longer than a waiting copy's delay
        bench.worker(concurrency=8)
        results, bodies = {}, {}
        for name in ("late-skip", "late-raise"):
            for act, expect in (("hold", "one attempt"), ("hold-boom", "run")):
                tag = f"{name}, {act}"
                task, following = bench.app.tasks[name], bench.app.tasks["next"]
                results[tag] = chain(task.s(tag, acts=[[act], ["sleep"]]), following.s(tag)).apply_async()
                bench.expect(results[tag].parent.id, expect)
                bodies[tag] = bench.body(tag)
        _deliver_twice(bench, "redis", *bodies.values())
        for tag in results:
            bench.go(tag)
        for tag in results:
            bench.wait("next", tag=tag)
        _all_copies_end(bench, "redis", 6)
        bench.settle()
        ids = [result.parent.id for result in results.values()]
        states = ["SUCCESS"] * len(ids)  # stored after the next step is published
        until(lambda: states == [bench.app.AsyncResult(task_id).state for task_id in ids], "all succeed")
        assert ["held", "slept"] * 2 == [bench.app.AsyncResult(task_id).get(timeout=1) for task_id in ids]
        assert [1, 2] * 2 == [len(bench.ledger.events("start", tag=tag)) for tag in results]
        assert [1] * 4 == [len(bench.ledger.events("next", tag=tag)) for tag in results]
        assert not bench.ledger.events("duplicate")


def _all_copies_end(bench: Bench, kind: str, bodies: int) -> None:
    """Wait until no worker has, or waits for, a copy of a message; no more than so many bodies have begun then."""

    def begun() -> int:
        return len(bench.ledger.events("start"))

    def empty() -> bool:
        inspect = bench.app.control.inspect(timeout=1.0)
        replies = [inspect.active(), inspect.reserved(), inspect.scheduled()]
        return all(reply and len(reply) == len(bench.workers) and not any(reply.values()) for reply in replies)

    until(lambda: begun() > bodies or (empty() and empty()), f"no copy is left, {kind}", 40, 0.3)
    assert bodies == begun(), f"{begun()} bodies began, not {bodies}"
