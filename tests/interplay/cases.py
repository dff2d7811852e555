"""What must be so with every broker, pool and habit: one function for each kind of duplicate.

They see what a worker logged and bodies recorded, so they also work where there are no results.
"""

from __future__ import annotations

from celery import states
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from tests.integration.environment import WorkerEnvironment
from tests.servers import until


def has_results(env: WorkerEnvironment) -> bool:
    """Tell whether results are stored."""
    conf = env.app.conf
    return not conf.task_ignore_result and "disabled" not in str(conf.result_backend)


def route(env: WorkerEnvironment) -> dict[str, str]:
    """Return how to send a task to the queue that is bound by a pattern, where there is one."""
    conf = env.app.conf
    return {"queue": f"{conf.task_default_queue}-topic", "routing_key": "jobs.here"} if conf.get("test_topic") else {}


def bodies(env: WorkerEnvironment) -> list[str]:
    """Return the task ids of the bodies that have started."""
    return [start["id"] for start in env.starts()]


def lines(env: WorkerEnvironment, result: AsyncResult, *words: str, count: int = 1) -> list[str]:
    """Wait for lines of the worker's log about a task."""
    return env.worker.wait_for_lines(f"[{result.id}]", *words, count=count)


def nothing_is_left(env: WorkerEnvironment, *results: AsyncResult) -> None:
    """Wait until every delivery of these tasks has been worked off, and check that each postponement was one message."""
    for result in results:
        until(lambda result=result: deliveries(env, result) == ends(env, result), "all deliveries have ended")
        assert deliveries(env, result) == 1 + len(again(env, result))


def deliveries(env: WorkerEnvironment, result: AsyncResult) -> int:
    """Return how often a worker began with a task."""
    return len(env.signals(result.id, "task_prerun"))


def ends(env: WorkerEnvironment, result: AsyncResult) -> int:
    """Return how often a worker was done with a task."""
    return len(env.signals(result.id, "task_postrun"))


def again(env: WorkerEnvironment, result: AsyncResult) -> list[str]:
    """Return the log lines about publishing a task again."""
    own = env.worker.lines(f"[{result.id}]")
    return [line for line in own if " waits " in line or "redelivered while another delivery" in line]


def skipped(env: WorkerEnvironment) -> None:
    """A skipped duplicate never runs, and is a SUCCESS."""
    holder = env.hold("skip", **route(env))
    duplicate = env.job("skip").apply_async((env.tag,), **route(env))
    lines(env, duplicate, "skipped")
    env.let_go()
    lines(env, holder, "succeeded")
    if has_results(env):
        assert env.get(duplicate) is None
    nothing_is_left(env, holder, duplicate)
    assert [holder.id] == bodies(env)


def refused(env: WorkerEnvironment) -> None:
    """A refused duplicate never runs, and is a FAILURE."""
    holder = env.hold("raising", **route(env))
    duplicate = env.job("raising").apply_async((env.tag,), **route(env))
    lines(env, duplicate, "failed as a duplicate")
    env.let_go()
    lines(env, holder, "succeeded")
    if has_results(env):
        assert isinstance(env.error(duplicate), DuplicateTask)
        assert states.FAILURE == duplicate.state
    nothing_is_left(env, holder, duplicate)
    assert [holder.id] == bodies(env)


def postponed(env: WorkerEnvironment) -> None:
    """A postponed duplicate runs once, after the holder."""
    holder = env.hold("retry", **route(env))
    duplicate = env.job("retry").apply_async((env.tag,), **route(env))
    lines(env, duplicate, " waits ", count=2)
    env.let_go()
    lines(env, duplicate, "succeeded")
    if has_results(env):
        assert "done" == env.get(duplicate)
    nothing_is_left(env, holder, duplicate)
    assert [holder.id, duplicate.id] == bodies(env)


def redelivered(env: WorkerEnvironment) -> None:
    """A message that is delivered twice at once runs once."""
    holder = env.hold("skip", **route(env))
    env.job("skip").apply_async((env.tag,), task_id=holder.id, **route(env))
    lines(env, holder, "redelivered while another delivery", count=2)
    env.let_go()
    lines(env, holder, "dropped")
    if has_results(env):
        assert "held" == env.get(holder)
    until(lambda: deliveries(env, holder) == ends(env, holder), "all deliveries have ended")
    assert deliveries(env, holder) == 2 + len(again(env, holder))
    assert [holder.id] == bodies(env)


def id_used_again(env: WorkerEnvironment) -> None:
    """New work under the task id of redelivered work that has ended runs."""
    redelivered(env)
    (task_id,) = bodies(env)
    env.job("skip").apply_async((env.tag, "return"), task_id=task_id, **route(env))
    env.wait_for("end", count=2)
    assert [task_id, task_id] == bodies(env)


def nameless_class(env: WorkerEnvironment) -> None:
    """A class-based task whose name Celery makes is locked, with its results ignored or not."""
    name = "tests.integration.tasks.Nameless"
    holder = env.hold(name, **route(env))
    duplicate = env.job(name).apply_async((env.tag,), **route(env))
    lines(env, duplicate, "skipped")
    env.let_go()
    nothing_is_left(env, holder, duplicate)
    assert [holder.id] == bodies(env)


CASES = {case.__name__: case for case in (skipped, refused, postponed, redelivered, id_used_again, nameless_class)}
