"""(m) Settings for failover: what `singleton_lock_replicas` and `singleton_lock_grace` add to an acquire and its release."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from typing import Any

from redis import Redis

from benchmarks.cycle import request_for
from benchmarks.report import Section, Table
from benchmarks.rounds import Rounds, Spread
from benchmarks.stage import Stage
from benchmarks.tasks import OURS, SCALARS
from celery_singleton_lock.store.protocol import GracePeriod
from celery_singleton_lock.store.redis import RedisStore, connector
from tests.servers import RedisServer, until

#: Cycles of one sample.
SIZE = 200
HOW = (
    "An acquire and its release, with records, in this process; the primary and its replica are servers of their own on this "
    f"machine. Of {SIZE} in a row: CPU is that of this process, and of the primary."
)


def run(stage: Stage) -> Section:
    """Measure each setting, both, and none."""
    with ExitStack() as stack:
        primary = stack.enter_context(RedisServer())
        stack.enter_context(RedisServer("--replicaof", f"127.0.0.1 {primary.port}"))
        client: Any = stack.enter_context(Redis.from_url(primary.url()))
        until(lambda: client.set("joined", 1) and client.wait(1, 100), "the replica acknowledges writes")
        cpu: dict[str, list[tuple[float, float]]] = {}
        candidates = {}
        for replicas, grace in product((0, 1), (False, True)):
            name = ", ".join(one for one in ("replicas=1" * replicas, "grace" * grace) if one) or "neither"
            store = RedisStore(connector(primary.url(), {}), 5.0, None, 100, replicas=replicas, grace=grace)
            stack.callback(store.close)
            cpu[name] = []
            candidates[name] = _sample(_cycles(stage, store), client, cpu[name])
        rounds = Rounds(candidates, stage.few(40, 3))
    rows = [
        (name, (rounds.spread(name, 1e6), *[Spread.of([one[of] for one in used], 1e6) for of in (0, 1)]))
        for name, used in cpu.items()
    ]
    return Section("(m) failover", HOW, [Table("One cycle", ("µs", "CPU, µs", "CPU of the primary, µs"), rows)], [])


def _cycles(stage: Stage, store: RedisStore) -> Callable[[], None]:
    """Return what runs so many cycles; the grace period of the name is over."""
    claim = replace(request_for(stage.tasks[OURS], *SCALARS), grace=0.001)
    with suppress(GracePeriod):
        store.acquire(claim)
    time.sleep(0.05)

    def cycles() -> None:
        for _ in range(SIZE):
            store.acquire(claim)
            store.release(claim, success=True)

    cycles()
    return cycles


def _sample(cycles: Callable[[], None], client: Any, cpu: list[tuple[float, float]]) -> Callable[[], float]:
    def used() -> tuple[float, float]:
        server = client.info("cpu")
        return time.process_time(), server["used_cpu_sys"] + server["used_cpu_user"]

    def sample() -> float:
        before, begin = used(), time.perf_counter()
        cycles()
        end, after = time.perf_counter(), used()
        cpu.append(((after[0] - before[0]) / SIZE, (after[1] - before[1]) / SIZE))
        return (end - begin) / SIZE

    return sample
