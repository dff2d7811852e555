"""A task's body is locked however the task is written; a user's mistakes keep their usual effects."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord, states

from celery_singleton_lock import ConfigurationError, DuplicateTask
from tests.integration.environment import WorkerEnvironment

SHAPES = [
    *("skip", "unbound", "class_based", "shared", "django", "tests.integration.tasks.Nameless"),
    *("rude_call", "rude_before_start", "rude_run", "rude_all", "coroutine"),
]


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job_or_skip(env: WorkerEnvironment, name: str) -> Any:
    if name == "django" and "job.django" not in env.app.tasks:
        pytest.skip("Django is not installed")
    return env.job(name)


@pytest.mark.parametrize("name", SHAPES)
def test_duplicate_is_skipped(env: WorkerEnvironment, name: str) -> None:
    """The lock covers tasks with or without bind, class-based, shared and Django tasks, and overridden hooks."""
    job = job_or_skip(env, name)
    holder = env.hold(name)
    duplicate = job.apply_async((env.tag,))
    assert env.get(duplicate) is None
    assert [holder.id] == [start["id"] for start in env.starts()]
    env.let_go()
    assert "held" == env.get(holder)
    assert "done" == env.get(job.apply_async((env.tag, "return")))
    assert not env.events("wrong run")


@pytest.mark.parametrize("name", ["rude_before_start", "rude_all"])
def test_no_user_code_runs_for_a_duplicate(env: WorkerEnvironment, name: str) -> None:
    """``before_start`` runs for the holder only, and while it has the lease."""
    env.hold(name)
    env.get(env.job(name).apply_async((env.tag,)))
    assert 1 == len(env.events("before_start"))


@pytest.mark.parametrize("name", SHAPES)
def test_lease_is_there_in_the_body(env: WorkerEnvironment, name: str) -> None:
    """The body can read its lease in every kind of task."""
    job = job_or_skip(env, name)
    env.get(job.apply_async((env.tag,)))
    (start,) = env.starts()
    assert start["held"] is True
    assert start["protected"] is True
    assert start["key"] == job.lock_key_for(env.tag)


def test_awaitable_is_refused(env: WorkerEnvironment) -> None:
    """A body that returns an awaitable fails in words, its coroutine does not run, and its lock is free."""
    for _ in range(2):
        error = env.error(env.job("awaitable").delay(env.tag))
        assert isinstance(error, ConfigurationError)
        assert "task job.awaitable: its body returned an awaitable of type coroutine" in str(error)
    assert [] == env.starts()


def test_autoretry_never_retries_a_duplicate(env: WorkerEnvironment) -> None:
    """autoretry_for=(Exception,) does not turn DuplicateTask into a retry."""
    env.hold("auto")
    duplicate = env.job("auto").delay(env.tag)
    assert isinstance(env.error(duplicate), DuplicateTask)
    env.finish(duplicate.id)
    assert 1 == len(env.lock_signals(env.key("auto"), "duplicate"))
    assert 1 == len(env.signals(duplicate.id, "task_prerun"))
    assert [] == env.signals(duplicate.id, "task_retry")


def test_autoretry_retries_the_body(env: WorkerEnvironment) -> None:
    """The body's own errors are retried as usual, and each retry is granted."""
    result = env.job("auto").delay(env.tag, ["raise", "raise", "return"])
    assert "done" == env.get(result)
    assert [0, 1, 2] == [start["retries"] for start in env.starts()]


def test_spellings_of_one_call_meet(env: WorkerEnvironment) -> None:
    """Positional, keyword and default spellings are the same work; another value is not."""
    job = env.job("all_arguments")
    held = job.delay(env.tag, "hold")
    env.wait_for("start")
    for args, kwargs in (
        ((env.tag,), {"acts": "hold"}),
        ((), {"tag": env.tag, "acts": "hold", "note": "x"}),
        ((env.tag, "hold", "x"), {}),
    ):
        assert isinstance(env.error(job.apply_async(args, kwargs)), DuplicateTask)
    assert "done" == env.get(job.delay(env.tag, "return"))
    env.let_go()
    assert "held" == env.get(held)


def test_not_locked_directly(env: WorkerEnvironment) -> None:
    """A direct call acquires no lock and is not blocked by one; its lease protects nothing."""
    env.hold("skip")
    assert "done" == env.job("skip")(env.tag, "return")
    direct = env.starts()[1]
    assert direct["protected"] is False


def test_map_items_are_not_locked(env: WorkerEnvironment) -> None:
    """Items of ``starmap`` and ``chunks`` are direct calls inside other tasks, so none is skipped."""
    env.hold("skip")
    items = [(env.tag, "return")] * 3
    assert ["done"] * 3 == env.get(env.job("skip").starmap(items).apply_async())
    assert [["done"] * 2, ["done"]] == env.get(env.job("skip").chunks(items, 2).apply_async())
    assert [True] + [False] * 6 == [start["protected"] for start in env.starts()]


def test_mixed_chord(env: WorkerEnvironment) -> None:
    """A chord of a class-based and a shared task runs as with plain tasks."""
    header = [env.job("class_based").s(env.other_tag("a")), env.job("shared").s(env.tag)]
    result = chord(header)(env.app.tasks["collect"].s(env.other_tag("collected")))
    assert ["done", "done"] == env.get(result)
    assert states.SUCCESS == result.state
