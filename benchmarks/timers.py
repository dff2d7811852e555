"""Timers around what a worker's process does with a task; only workers of `within` have them, as they cost time themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import wraps
from time import perf_counter, thread_time
from typing import Any, TypeAlias

from celery import Celery
from celery.signals import worker_process_init, worker_ready

from benchmarks.gates import TIMED
from celery_singleton_lock import task
from celery_singleton_lock.plan import Plan
from celery_singleton_lock.stores.redis import RedisStore

#: Of each call seconds, and seconds of the thread's CPU.
Taken: TypeAlias = list[tuple[float, float]]

#: What is timed, in the order of the tables.
PARTS = TRACER, COMMANDS, EXECUTE, KEY, ACQUIRE, RELEASE = (
    "tracer", "two commands", "execute", "key", "acquire", "release",
)  # fmt: skip

_taken: dict[str, Taken] = {part: [] for part in PARTS}


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, with what it takes written down under this part's name."""
    add = _taken[part].append

    @wraps(call)
    def timing(*args: Any, **kwargs: Any) -> Any:
        begin, cpu = perf_counter(), thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            add((perf_counter() - begin, thread_time() - cpu))

    return timing


def install(app: Celery, names: Iterable[str], push: Callable[[str, str], object]) -> None:
    """Put timers around parts of the library, and around the tracers of some tasks once those are made.

    Arguments:
        app: whose tasks are timed.
        names: of these tasks.
        push: puts a text into a list on the broker's server.
    """
    for owner, name, part in (
        (task, "execute", EXECUTE),
        (Plan, "digest", KEY),
        (RedisStore, "acquire", ACQUIRE),
        (RedisStore, "release", RELEASE),
    ):
        setattr(owner, name, timed(part, getattr(owner, name)))

    def time_tracers(**_: Any) -> None:
        for name in names:
            app.tasks[name].__trace__ = timed(TRACER, app.tasks[name].__trace__)

    worker_process_init.connect(time_tracers, weak=False)  # `celery.concurrency.prefork` has just made them (5.7)
    worker_ready.connect(time_tracers, weak=False)  # `celery.worker.consumer`, for the pools that have no processes

    @app.task(name="benchmarks.timed", shared=False)
    def tell_timed() -> None:
        """Tell what was taken since this was asked last."""
        push(TIMED, json.dumps({part: taken for part, taken in _taken.items() if taken}))
        for taken in _taken.values():
            taken.clear()
