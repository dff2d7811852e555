"""What must be so with every broker, pool and habit: one function for each kind of duplicate.

They see what a worker logged and bodies recorded, so they also work where there are no results.
"""

from __future__ import annotations

from celery import states
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from tests.integration.bench import Bench
from tests.servers import until


def has_results(bench: Bench) -> bool:
    """Tell whether results are stored."""
    conf = bench.app.conf
    return not conf.task_ignore_result and "disabled" not in str(conf.result_backend)


def route(bench: Bench) -> dict[str, str]:
    """Return how to send a task to the queue that is bound by a pattern, where there is one."""
    conf = bench.app.conf
    return {"queue": f"{conf.task_default_queue}-topic", "routing_key": "jobs.here"} if conf.get("test_topic") else {}


def bodies(bench: Bench) -> list[str]:
    """Return the task ids of the bodies that have started."""
    return [start["id"] for start in bench.starts()]


def lines(bench: Bench, result: AsyncResult, *words: str, count: int = 1) -> list[str]:
    """Wait for lines of the worker's log about a task."""
    return bench.worker.wait_for_lines(f"[{result.id}]", *words, count=count, timeout=20)


def nothing_is_left(bench: Bench, *results: AsyncResult) -> None:
    """Wait until every delivery of these tasks has been worked off, and check that each postponement was one message."""
    for result in results:
        until(lambda result=result: deliveries(bench, result) == ends(bench, result), "all deliveries have ended")
        assert deliveries(bench, result) == 1 + len(again(bench, result))


def deliveries(bench: Bench, result: AsyncResult) -> int:
    """Return how often a worker began with a task."""
    return len(bench.signals(result.id, "task_prerun"))


def ends(bench: Bench, result: AsyncResult) -> int:
    """Return how often a worker was done with a task."""
    return len(bench.signals(result.id, "task_postrun"))


def again(bench: Bench, result: AsyncResult) -> list[str]:
    """Return the log lines about publishing a task again."""
    own = bench.worker.lines(f"[{result.id}]")
    return [line for line in own if " waits " in line or "is running in another delivery" in line]


def skipped(bench: Bench) -> None:
    """A skipped duplicate never runs, and is a SUCCESS."""
    holder = bench.hold("skip", **route(bench))
    duplicate = bench.job("skip").apply_async((bench.tag,), **route(bench))
    lines(bench, duplicate, "skipped")
    bench.let_go()
    lines(bench, holder, "succeeded")
    if has_results(bench):
        assert bench.get(duplicate) is None
    nothing_is_left(bench, holder, duplicate)
    assert [holder.id] == bodies(bench)


def refused(bench: Bench) -> None:
    """A refused duplicate never runs, and is a FAILURE."""
    holder = bench.hold("raising", **route(bench))
    duplicate = bench.job("raising").apply_async((bench.tag,), **route(bench))
    lines(bench, duplicate, "refused")
    bench.let_go()
    lines(bench, holder, "succeeded")
    if has_results(bench):
        assert isinstance(bench.error(duplicate), DuplicateTask)
        assert states.FAILURE == duplicate.state
    nothing_is_left(bench, holder, duplicate)
    assert [holder.id] == bodies(bench)


def postponed(bench: Bench) -> None:
    """A postponed duplicate runs once, after the holder."""
    holder = bench.hold("retry", **route(bench))
    duplicate = bench.job("retry").apply_async((bench.tag,), **route(bench))
    lines(bench, duplicate, " waits ", count=2)
    bench.let_go()
    lines(bench, duplicate, "succeeded")
    if has_results(bench):
        assert "done" == bench.get(duplicate)
    nothing_is_left(bench, holder, duplicate)
    assert [holder.id, duplicate.id] == bodies(bench)


def redelivered(bench: Bench) -> None:
    """A message that is delivered twice at once runs once."""
    holder = bench.hold("skip", **route(bench))
    bench.job("skip").apply_async((bench.tag,), task_id=holder.id, **route(bench))
    lines(bench, holder, "is running in another delivery", count=2)
    bench.let_go()
    lines(bench, holder, "dropped")
    if has_results(bench):
        assert "held" == bench.get(holder)
    until(lambda: deliveries(bench, holder) == ends(bench, holder), "all deliveries have ended")
    assert deliveries(bench, holder) == 2 + len(again(bench, holder))
    assert [holder.id] == bodies(bench)


def id_used_again(bench: Bench) -> None:
    """New work under the task id of redelivered work that has ended runs."""
    redelivered(bench)
    (task_id,) = bodies(bench)
    bench.job("skip").apply_async((bench.tag, "return"), task_id=task_id, **route(bench))
    bench.wait_for("end", count=2)
    assert [task_id, task_id] == bodies(bench)


def nameless_class(bench: Bench) -> None:
    """A class-based task whose name Celery makes is locked, with its results ignored or not."""
    name = "tests.integration.tasks.Nameless"
    holder = bench.hold(name, **route(bench))
    duplicate = bench.job(name).apply_async((bench.tag,), **route(bench))
    lines(bench, duplicate, "skipped")
    bench.let_go()
    nothing_is_left(bench, holder, duplicate)
    assert [holder.id] == bodies(bench)


CASES = {case.__name__: case for case in (skipped, refused, postponed, redelivered, id_used_again, nameless_class)}
