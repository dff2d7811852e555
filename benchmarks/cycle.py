"""(a) The lock cycle: all that is done around a body, against the same two commands over a raw socket, and other locks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from redis import Redis

from benchmarks.raw import RawSocket
from benchmarks.report import Bars, Section, Table, Target
from benchmarks.rounds import Rounds, Sample, median_of, timed
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, OURS, SCALARS
from benchmarks.tracer import around_body, request_of, traced_request
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.requests import LeaseSpec

RAW = "raw socket, same two EVALSHA"
LIBRARY = "this library, all around a body"
CHILD = "the same, with the attempt key of prefork"
STORE = "this library, its store alone"
NONE = "a body without a lock"

HOW = (
    "Acquire and release, uncontended. The library: a task is called as the tracer calls it, with a request "
    "pushed and a body that does nothing, so from the tracer's call to the body, and from the body to the "
    "return (key of three scalars, token, acquire, renewer, release); the bare task is called in the same way. "
    "The raw socket replays the very commands that one such call sends."
)


def run(stage: Stage) -> Section:
    """Measure the cycle."""
    with stage.socket() as raw:
        repeats = stage.few(200, 50)
        found = Rounds(
            {name: median_of(one, repeats) for name, one in candidates(stage, raw).items()}, stage.few(30, 6)
        )
    rows = [(name, (found.spread(name, 1e6), found.ratio(name, RAW))) for name in found.values]
    target = Target("all around a body / raw socket", found.ratio(LIBRARY, RAW).median, 2.2)
    shown = {name: found.spread(name, 1e6) for name in found.values if name != NONE}
    return Section(
        "(a) lock cycle",
        HOW,
        [Table("One cycle", ("µs (quartiles)", "× raw socket"), rows)],
        [target],
        [Bars("Lock cycle: acquire and release", "µs", shown)],
    )


def candidates(stage: Stage, raw: RawSocket) -> dict[str, Sample]:
    """One cycle of each."""
    ours, commands = partial(around_body, stage.tasks[OURS], SCALARS), stage.commands()
    cycles = {
        RAW: raw.all_of(commands),
        STORE: _store_cycle(stage),
        "redis-py client, same two EVALSHA": _client_cycle(stage.client, commands),
        "redis-py Lock": _redis_py_lock(stage.client),
        **_python_redis_lock(stage.client),
    }
    others = {name: _after_a_request(stage.tasks[BARE], timed(one)) for name, one in cycles.items()}
    child = partial(around_body, stage.tasks[OURS], SCALARS, supervised=True)
    return {
        RAW: others.pop(RAW),
        LIBRARY: ours,
        CHILD: child,
        NONE: partial(around_body, stage.tasks[BARE], SCALARS),
        **others,
    }


def _after_a_request(task: Any, sample: Sample) -> Sample:
    """The same after a request has been made, untimed, as before a task is called: else the server would be warmer."""

    def after() -> float:
        traced_request(task, SCALARS)
        return sample()

    return after


def request_for(task: Any, *args: Any) -> LeaseSpec:
    """The claim of a delivery with these arguments."""
    plan, request = config_for(task), request_of(task, args)
    token, ttl = request["id"].replace("-", ""), plan.options.lock_ttl
    return LeaseSpec(plan.base, plan.digest(args, {}), token, ttl, request["id"], request["hostname"], 1)


def _store_cycle(stage: Stage) -> Callable[[], None]:
    store, claim = context_of(stage.app).store, request_for(stage.tasks[OURS], *SCALARS)

    def cycle() -> None:
        store.acquire(claim)
        store.release(claim, success=True)

    return cycle


def _client_cycle(client: Any, commands: list[list[str]]) -> Callable[[], None]:
    def cycle() -> None:
        for command in commands:
            client.execute_command(*command)

    return cycle


def _redis_py_lock(client: Any) -> Callable[[], None]:
    def cycle() -> None:
        lock = client.lock("benchmarks:redis-py", timeout=30, blocking=False)
        lock.acquire()
        lock.release()

    return cycle


def _python_redis_lock(client: Redis) -> dict[str, Callable[[], None]]:
    if not find_spec("redis_lock"):
        return {}
    from redis_lock import Lock

    def cycle() -> None:
        lock = Lock(client, "benchmarks:python-redis-lock", expire=30)
        lock.acquire(blocking=False)
        lock.release()

    return {"python-redis-lock": cycle}
