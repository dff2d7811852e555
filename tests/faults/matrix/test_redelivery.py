"""Fault 15: the same message is delivered twice at once. The second delivery waits until the first has ended."""

from __future__ import annotations

import pytest
from celery import chain

from tests.faults.harness import WorkerEnvironment, kind_of, since
from tests.faults.ledger import Event
from tests.faults.matrix import LATE
from tests.servers import RabbitMQServer, until

#: Kombu redelivers a message after 2 s though its body still runs, and checks every second.
SWEEP = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}


def _bench(broker: str | RabbitMQServer, visibility: float = 2) -> WorkerEnvironment:
    """Return an environment without STARTED: Celery (5.7) reads a state before it writes one, so it may undo a SUCCESS."""
    conf = {"task_track_started": False}
    if isinstance(broker, str):
        return WorkerEnvironment(ttl=20, broker_transport_options={**SWEEP, "visibility_timeout": visibility}, **conf)
    return WorkerEnvironment(ttl=20, broker=broker, broker_proxied=True, **conf)


def _deliver_twice(env: WorkerEnvironment, broker: str | RabbitMQServer, *bodies: Event) -> None:
    """Cause a redelivery of messages whose bodies still run, and wait until each redelivery has requested its lock."""
    if isinstance(broker, RabbitMQServer):
        env.broker_proxy.cut()
    until(lambda: all(_deliveries(env, body) >= 2 for body in bodies), "second deliveries ask", LATE, 0.1)


def _deliveries(env: WorkerEnvironment, body: Event) -> int:
    asked = env.ledger.events("store", verb="acquire", key=body["key"])
    return len({event["run"] for event in asked})


@pytest.mark.parametrize("workers", [1, 2])
def test_first_succeeds(broker: str | RabbitMQServer, workers: int) -> None:
    """A redelivery is dropped after a success: the body runs once, and the next step of the chain is published once."""
    with _bench(broker) as env:
        for worker in [env.start(concurrency=2) for _ in range(workers)]:
            worker.ready(env.app)
        late, following = env.app.tasks["late"], env.app.tasks["next"]
        result = chain(late.s("a", acts=[["hold"]]), following.s("a")).apply_async()
        env.expect(result.parent.id, "one attempt")
        _deliver_twice(env, broker, env.body("a"))
        env.go("a")
        assert "held" == result.get(timeout=LATE)
        _all_copies_end(env, kind_of(broker), 1)
        assert 1 == len(env.ledger.events("next"))
        assert "SUCCESS" == result.parent.state
        env.finish()


def test_first_fails(broker: str | RabbitMQServer) -> None:
    """A redelivery runs after the first delivery has failed, not before, and the chain continues after it."""
    with _bench(broker) as env:
        first = _held_twice(env, broker, "hold-boom")
        env.go("a")
        env.end(first)
        env.body("a", 2)
        _chain_goes_on(env, broker)


def test_first_dies(broker: str | RabbitMQServer) -> None:
    """A redelivery runs after the process of the first delivery has died, and the chain continues after it."""
    with _bench(broker) as env:
        first = _held_twice(env, broker, "hold")
        killed = env.kill_child(first["pid"])
        second = env.body("a", 2)
        env.measured(f"15 first delivery killed, {kind_of(broker)}: the second runs", 10, since(killed, second["at"]))
        _chain_goes_on(env, broker)


def _held_twice(env: WorkerEnvironment, broker: str | RabbitMQServer, act: str) -> Event:
    """Return the start of a body that does this act and whose message, the first of a chain, was redelivered."""
    env.worker(concurrency=2)
    late, following = env.app.tasks["late"], env.app.tasks["next"]
    result = chain(late.s("a", acts=[[act], ["sleep", 0.5]]), following.s("a")).apply_async()
    env.expect(result.parent.id, "run")
    first = env.body("a")
    _deliver_twice(env, broker, first)
    return first


def _chain_goes_on(env: WorkerEnvironment, broker: str | RabbitMQServer) -> None:
    """Check that the next step is published once and that two bodies have run."""
    env.wait("next")
    _all_copies_end(env, kind_of(broker), 2)
    assert 1 == len(env.ledger.events("next"))
    env.finish()


def test_no_duplicate_of_itself() -> None:
    """Under skip and raise, too, a redelivery waits; it is dropped after a success and runs after a failure."""
    with _bench("redis", visibility=6) as env:  # longer than the delay of a waiting redelivery
        env.worker(concurrency=8)
        results, bodies = {}, {}
        for name in ("late-skip", "late-raise"):
            for act, expect in (("hold", "one attempt"), ("hold-boom", "run")):
                tag = f"{name}, {act}"
                task, following = env.app.tasks[name], env.app.tasks["next"]
                results[tag] = chain(task.s(tag, acts=[[act], ["sleep"]]), following.s(tag)).apply_async()
                env.expect(results[tag].parent.id, expect)
                bodies[tag] = env.body(tag)
        _deliver_twice(env, "redis", *bodies.values())
        for tag in results:
            env.go(tag)
        for tag in results:
            env.wait("next", tag=tag)
        _all_copies_end(env, "redis", 6)
        env.finish()
        ids = [result.parent.id for result in results.values()]
        states = ["SUCCESS"] * len(ids)  # stored after the next step is published
        until(lambda: states == [env.app.AsyncResult(task_id).state for task_id in ids], "all succeed")
        assert ["held", "slept"] * 2 == [env.app.AsyncResult(task_id).get(timeout=1) for task_id in ids]
        assert [1, 2] * 2 == [len(env.ledger.events("start", tag=tag)) for tag in results]
        assert [1] * 4 == [len(env.ledger.events("next", tag=tag)) for tag in results]
        assert not env.ledger.events("duplicate")


def test_no_duplicate_of_itself_before_others() -> None:
    """Under each other policy, too, a redelivery of the holder's message is dropped after a success, and what waits runs."""
    names = [f"late-{name}" for name in ("wait", "once-more", "latest", "replace", "join")]
    with _bench("redis", visibility=6) as env:
        env.worker(concurrency=2 * len(names))
        env.worker("threads", 8, options=("-Q", "two"))
        bodies = {}
        for name in names:
            env.send(name, name, ["hold"], expect="one attempt")
            bodies[name] = env.body(name)
        _deliver_twice(env, "redis", *bodies.values())
        waiting = {name: env.send(name, name, expect="any", queue="two") for name in names}
        for result in waiting.values():
            env.wait("duplicate", task_id=result.id)
        for name in names:
            env.go(name)
        ends = {name: result.get(timeout=LATE) for name, result in waiting.items()}
        assert {name: "held" if name == "late-join" else "slept" for name in names} == ends
        _all_copies_end(env, "redis", 2 * len(names) - 1)  # what joins does not run
        for name, body in bodies.items():
            ids = [event["task_id"] for event in env.ledger.events("start", tag=name)]
            assert 1 == ids.count(body["task_id"])
        env.finish()


def _all_copies_end(env: WorkerEnvironment, kind: str, bodies: int) -> None:
    """Wait until no worker has a redelivery left, and check how many bodies have begun."""

    def begun() -> int:
        return len(env.ledger.events("start"))

    def empty() -> bool:
        inspect = env.app.control.inspect([worker.node for worker in env.workers], timeout=1.0)
        replies = [inspect.active(), inspect.reserved(), inspect.scheduled()]
        return all(reply and len(reply) == len(env.workers) and not any(reply.values()) for reply in replies)

    until(lambda: begun() > bodies or (empty() and empty()), f"no copy is left, {kind}", LATE, 0.3)
    assert bodies == begun(), f"{begun()} bodies began, not {bodies}"
