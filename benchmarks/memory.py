"""(g) What a held lock takes of memory, in the process that holds it and in the store."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks.cycle import request_for
from benchmarks.report import Section, Table
from benchmarks.stage import Stage
from benchmarks.sweep import FAR, leases
from benchmarks.tasks import ONCE, OURS, SINGLETON
from celery_singleton_lock.context import context_of

HOW = (
    "Process: bytes that Python has allocated for many held locks that have been renewed (tracemalloc), divided by their number; "
    "the peers' task classes keep nothing there, and renew nothing; their lock objects were not measured. "
    "Store: growth of used_memory by many locks of "
    "different keys, divided by their number."
)


def run(stage: Stage) -> Section:
    """Measure both."""
    size = stage.few(10_000, 1000)
    context_of(stage.app).store.eviction_policy()  # connects, so that no connection is counted as a lock
    process = in_process(stage, size)
    makers = _makers(stage)
    rows: list[tuple[str, tuple[int | str, int]]] = []
    for name, make in makers.items():
        rows.append((name, (process if name == OURS else "–", in_store(stage, make, size))))
    return Section("(g) memory", HOW, [Table("One held lock", ("process, bytes", "store, bytes"), rows)])


def in_process(stage: Stage, size: int) -> int:
    """Bytes of this process for each lock that it holds."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with leases(stage, size, FAR) as (renewer, granted):
            for lease in granted:
                lease.due = 0.0
            renewer.renew_due()
            gc.collect()
            return (tracemalloc.get_traced_memory()[0] - before) // size
    finally:
        tracemalloc.stop()


def in_store(stage: Stage, make: Callable[[int], object], size: int) -> int:
    """Bytes of the store for each lock that this makes."""
    stage.clear()
    before = _used(stage.client)
    for number in range(size):
        make(number)
    used = _used(stage.client) - before
    stage.clear()
    return used // size


def _used(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def _makers(stage: Stage) -> dict[str, Callable[[int], object]]:
    """What takes the lock of a numbered call and keeps it."""
    tasks, client = stage.tasks, stage.client
    store = context_of(stage.app).store

    def claim(number: int) -> Any:
        return request_for(tasks[OURS], number, "account-17", 0.0)

    makers: dict[str, Callable[[int], object]] = {
        OURS: lambda number: store.acquire(claim(number)),
        f"{OURS}, prefork": lambda number: store.acquire(replace(claim(number), supervised=True)),
        "redis-py Lock": lambda number: client.lock(f"benchmarks:{number}", timeout=30).acquire(),
    }
    if ONCE in tasks:
        once = tasks[ONCE]
        makers[ONCE] = lambda number: once.once_backend.raise_or_lock(once.get_key((number, "account-17", 0.0)), 3600)
    if SINGLETON in tasks:
        single = tasks[SINGLETON]
        makers[SINGLETON] = lambda number: single.aquire_lock(
            single.generate_lock(single.name, (number, "account-17", 0.0)), f"{number:036}"
        )
    return {**makers, **_python_redis_lock(client)}


def _python_redis_lock(client: Any) -> dict[str, Callable[[int], object]]:
    if not find_spec("redis_lock"):
        return {}
    from redis_lock import Lock

    return {"python-redis-lock": lambda number: Lock(client, f"benchmarks:{number}", expire=30).acquire(blocking=False)}
