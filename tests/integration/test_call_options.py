"""Options of one call stay with its message, however it is published."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Signature, chain, chord, group, states
from celery.beat import ScheduleEntry, Scheduler

from celery_singleton_lock import ConfigurationError, DuplicateTask, RetryLater
from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER
from tests.integration.environment import WorkerEnvironment
from tests.servers import until

LATER = RetryLater(delay=0.2, backoff=1.0, max_delay=0.2, jitter=0.0)


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    return {"accept_content": ["json", "pickle"]}


def first(env: WorkerEnvironment) -> Signature:
    return env.app.tasks["then"].si(env.other_tag("first"))


def collect(env: WorkerEnvironment) -> Signature:
    return env.app.tasks["collect"].s(env.other_tag("collected"))


def send_by_beat(env: WorkerEnvironment, step: Signature) -> None:
    entry = ScheduleEntry(
        name="x", task=step.task, args=step.args, kwargs=step.kwargs, options=step.options, app=env.app
    )
    Scheduler(app=env.app, lazy=True).apply_async(entry)


#: Each publishes one signature in another way.
WAYS: dict[str, Callable[[WorkerEnvironment, Signature], Any]] = {
    "single": lambda env, step: step.apply_async(),
    "beat": send_by_beat,
    "first of a chain": lambda env, step: chain(step, first(env)).apply_async(),
    "second of a chain": lambda env, step: chain(first(env), step).apply_async(),
    "in a group": lambda env, step: group(first(env), step).apply_async(),
    "header of a chord": lambda env, step: chord([first(env), step], collect(env)).apply_async(),
    "body of a chord": lambda env, step: chord([first(env), first(env)], step).apply_async(),
    "link": lambda env, step: first(env).apply_async(link=step),
    "pickle": lambda env, step: chain(first(env).set(serializer="pickle"), step).apply_async(serializer="pickle"),
}


@pytest.mark.parametrize("way", WAYS)
def test_options_stay_with_the_message(env: WorkerEnvironment, way: str) -> None:
    """However a call is published, its key and its policy count, also after it was postponed. (Its task would skip it.)"""
    key, tag = f"customer-{env.tag}", env.other_tag("duplicate")
    env.hold("skip", lock_options={"lock_key": key})
    step = env.job("skip").si(tag).set(lock_options={"lock_key": key, "on_duplicate": LATER})
    WAYS[way](env, step)
    lock = env.starts()[0]["key"]
    assert lock != env.key()
    until(lambda: env.lock_signals(lock, "duplicate")[1:], "two duplicates")
    assert [] == env.starts(tag)
    env.let_go()
    start = env.wait_for("start", tag)
    assert (lock, True) == (start["key"], start["held"])
    env.wait_for("end", tag)
    env.finish(start["id"])
    assert 1 == len(env.starts(tag))


def test_own_retry_keeps_the_options(env: WorkerEnvironment) -> None:
    """A task's own retry uses the options of its call."""
    result = env.job("skip").apply_async((env.tag, ["retry", "return"]), lock_options={"lock_key": f"own-{env.tag}"})
    assert "done" == env.get(result)
    keys = [start["key"] for start in env.starts()]
    assert 2 == len(keys)
    assert {keys[0]} == set(keys) != {env.key()}


def test_template_of_a_call(env: WorkerEnvironment) -> None:
    """A template is filled with the arguments of the call."""
    options = {"lock_key": "{tag}{seconds}", "on_duplicate": "raise"}
    env.job("skip").apply_async((env.tag, "hold"), lock_options=options)
    env.wait_for("start")
    assert isinstance(env.error(env.job("skip").apply_async((env.tag,), lock_options=options)), DuplicateTask)
    other = env.job("skip").apply_async((env.tag,), {"acts": "return", "seconds": 1.0}, lock_options=options)
    env.wait_for("start", count=2)
    env.let_go()
    env.get(other)


def test_ttl_of_a_call(env: WorkerEnvironment) -> None:
    """The lease has the call's TTL, also after it was renewed, by whatever process. (The task's TTL is 1 s.)"""
    env.hold("skip_shortest", lock_options={"lock_ttl": 3})
    seen: list[tuple[float, int, float]] = []  # milliseconds: before a look, left then, and after that look

    def renewals() -> int:
        seen.append((1000 * time.monotonic(), store.pttl(key), 1000 * time.monotonic()))
        return sum(a[1] < b[1] for a, b in itertools.pairwise(seen))

    with contextlib.closing(env.store()) as store:
        key = env.key("skip_shortest")
        until(lambda: renewals() > 2, "renewals")
    assert max(left for _, left, _ in seen) <= 3000
    # None of them has shortened what is left: it falls no faster than the time passes.
    assert [] == [(a, b) for a, b in itertools.pairwise(seen) if a[1] - b[1] > b[2] - a[0] + 2]


def test_wrong_options_of_a_later_step(env: WorkerEnvironment) -> None:
    """The options of a later step are checked by the worker that publishes it; nobody waits for ever."""
    step = env.job("skip").si(env.other_tag("later")).set(lock_options={"lock_tll": 5})
    result = chain(env.job("skip").si(env.tag), step).apply_async()
    assert isinstance(env.error(result), ConfigurationError)
    assert states.FAILURE == env.wait_for_state(result.parent, states.FAILURE)
    assert [] == env.starts(env.other_tag("later"))


def test_options_that_a_worker_does_not_know(env: WorkerEnvironment) -> None:
    """A task with options of a newer publisher fails without running, and says why."""
    result = env.job("skip").apply_async((env.tag,), headers={LOCK_OPTIONS_HEADER: {"newer": 5}})
    error = env.error(result)
    assert isinstance(error, ConfigurationError)
    assert "job.skip: lock_options: newer=5" in str(error)
    assert [] == env.starts()
    assert not env.is_locked()


def test_publisher_without_the_library(env: WorkerEnvironment) -> None:
    """A program that knows nothing of this library can put the options into the header itself."""
    env.hold("skip")
    options = {"on_duplicate": "raise"}
    result = env.app.send_task("job.skip", (env.tag,), headers={LOCK_OPTIONS_HEADER: options})
    assert isinstance(env.error(result), DuplicateTask)
    dropped = env.app.send_task("job.skip", (env.tag,), lock_options=options)
    assert env.get(dropped) is None
