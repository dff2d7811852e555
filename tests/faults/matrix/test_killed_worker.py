"""Fault 3: a whole worker is killed, main process and children. No process can release its leases, so they expire."""

from __future__ import annotations

import pytest

from tests.faults.harness import WorkerEnvironment, kind_of, since
from tests.faults.matrix import LATE
from tests.servers import RabbitMQServer

TTL = 4.0
#: A worker that is killed while it restores messages of dead workers leaves Kombu's lock (5.7), by default for 300 s.
SWEEP = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_killed_worker(pool: str) -> None:
    """The lease expires with its TTL, not before and not much later, and a duplicate on another worker runs."""
    with WorkerEnvironment(ttl=TTL) as env:
        victim = env.start(pool)
        env.worker("threads", options=("-Q", "two"))
        victim.ready(env.app)
        env.send("retry", "a", ["hold"])
        body = env.body("a")
        result = env.send("retry", "a", ["sleep"], expect="once", queue="two")
        env.wait("duplicate")
        fault = env.kill(victim)
        freed = since(fault, env.gone(body))
        env.measured(f"3 worker killed, {pool}: lease gone", TTL + 0.5, freed, at_least=TTL * 2 / 3 - 0.3)
        env.measured(f"3 worker killed, {pool}: next run starts", TTL + 2, since(fault, env.body("a", 2)["at"]))
        assert "slept" == result.get(timeout=LATE)
        env.finish()


def test_redelivery(broker: str | RabbitMQServer) -> None:
    """A redelivered late-ack message of a killed worker waits for its own dead lease to expire, and runs to its end."""
    with WorkerEnvironment(
        ttl=TTL, broker=broker, **({"broker_transport_options": SWEEP} if broker == "redis" else {})
    ) as env:
        victim = env.worker()
        result = env.send("late", "a", ["hold"], ["sleep"], expect="once")
        env.body("a")
        # At once: after `visibility_timeout` the victim fetches its own message again, and a kill just then loses it (Kombu).
        fault = env.kill(victim)
        env.worker()
        again = env.body("a", 2)
        bound = TTL + 6 + SWEEP["visibility_timeout"]
        name = f"3 worker killed, late ack, {kind_of(broker)}: runs again"
        env.measured(name, bound, since(fault, again["at"]), at_least=TTL * 2 / 3 - 0.3)
        assert "slept" == result.get(timeout=LATE)
        env.finish()
