"""Bodies that return an awaitable are refused in words: Celery, or a pool that awaits results, would run them unlocked."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable
from functools import wraps
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.testing import assert_free, assert_held
from tests.unit.test_task import deliver

ran: list[str] = []


async def run(account: int) -> int:
    ran.append("begun")
    await asyncio.sleep(0)
    ran.append("ended")
    return account


async def run_bound(self: Any, account: int) -> int:
    return await run(account)


async def run_items(account: int) -> AsyncIterator[int]:
    yield account


def returning_coroutine(account: int) -> Any:
    return run(account)


class AsyncCall(SingletonTask):
    """A base class with an asynchronous `__call__`."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class ToTheEnd(SingletonTask):
    """A base class that runs the coroutine to its end."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(super().__call__(*args, **kwargs))


@pytest.fixture(autouse=True)
def _no_coroutine_is_forgotten() -> Any:
    """A coroutine that is never awaited is an error here, not a warning of Python's somewhere else."""
    ran.clear()
    with warnings.catch_warnings():
        for category in (RuntimeWarning, pytest.PytestUnraisableExceptionWarning):
            warnings.simplefilter("error", category)  # not for what earlier tests of the process have left behind
        yield


@pytest.mark.parametrize(
    ("body", "options", "name"),
    [
        (run, {}, "run"),
        (run_bound, {"bind": True}, "run_bound"),
        (run_items, {}, "run_items"),
        (run, {"autoretry_for": (Exception,)}, "run"),
        (returning_coroutine, {"base": AsyncCall}, "__call__"),
    ],
)
def test_async_def_is_refused(app: Celery, body: Any, options: dict[str, Any], name: str) -> None:
    """A task whose body is an ``async def`` is refused at each use, as one with a wrong option is."""
    task = app.task(**{"base": SingletonTask, "name": "x", "shared": False, **options})(body)
    for use in (lambda: task.delay(1), lambda: task(1), lambda: task.lock_key_for(1)):
        with pytest.raises(ConfigurationError, match=f"task x: {name} is an async def, .* without its lock"):
            use()
    assert isinstance(deliver(app.tasks["x"], 1).info.retval, ConfigurationError)


def test_class_with_async_run(app: Celery) -> None:
    """So is a class-based task."""

    class Report(SingletonTask):
        name = "report"

        async def run(self, account: int) -> None: ...

    task = app.register_task(Report())
    with pytest.raises(ConfigurationError, match="task report: run is an async def"):
        task.delay(1)


def returning_task(account: int) -> Any:
    return asyncio.get_running_loop().create_task(run(account))


def returning_items(account: int) -> Any:
    return run_items(account)


@pytest.mark.parametrize("options", [{}, {"on_lock_lost": "raise"}, {"lock_from": "publish", "lock_until": "start"}])
@pytest.mark.parametrize(
    ("body", "kind"),
    [(returning_coroutine, "coroutine"), (returning_task, "Task"), (returning_items, "async_generator")],
)
def test_awaitable_is_refused_at_run_time(app: Celery, body: Any, kind: str, options: dict[str, Any]) -> None:
    """What a plain function returns is seen when it returns: the task fails, its work does not go on, and its lock is free."""
    task = app.task(base=SingletonTask, name="x", shared=False, **options)(body)

    async def in_a_loop() -> Any:
        answer = deliver(task, 1)
        await asyncio.sleep(0.01)
        return answer.info.retval

    error = asyncio.run(in_a_loop())
    assert isinstance(error, ConfigurationError), error
    assert f"task x: its body returned an awaitable of type {kind}, " in str(error)
    assert "ended" not in ran
    assert_free(task, 1)


def test_it_is_never_retried(app: Celery) -> None:
    """`autoretry_for` does not bring it back."""
    task = app.task(base=SingletonTask, name="x", shared=False, autoretry_for=(Exception,))(returning_coroutine)
    assert "FAILURE" == deliver(task, 1).info.state


def to_its_end(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return asyncio.run(function(*args))

    return wrapper


@pytest.mark.parametrize(
    "options", [{"base": ToTheEnd}, {"base": ToTheEnd, "bind": True}, {"base": SingletonTask}], ids=str
)
def test_coroutine_that_is_run_to_its_end(app: Celery, options: dict[str, Any]) -> None:
    """A base class or a decorator that runs the coroutine to its end is fine: the lock is held until then."""
    seen = []

    async def watched(*args: Any) -> Any:
        seen.append(assert_held(app.tasks["x"], 1).task_id)
        return await run(args[-1])

    body: Any = watched
    if options["base"] is SingletonTask:
        body = to_its_end(watched)
    task = app.task(name="x", shared=False, **options)(body)
    assert 1 == deliver(app.tasks["x"], 1).retval
    assert (["id-1"], ["begun", "ended"]) == (seen, ran)
    assert_free(task, 1)


def test_plain_task_may_be_asynchronous(app: Celery) -> None:
    """``singleton=False`` takes no lock, so it may return what it likes."""
    task = app.task(base=SingletonTask, name="x", shared=False, singleton=False)(run)
    assert 1 == asyncio.run(task(1))


def test_direct_call_returns_the_awaitable(app: Celery) -> None:
    """A direct call takes no lock, so its caller may await what it returns."""
    task = app.task(base=SingletonTask, name="x", shared=False)(returning_coroutine)
    assert 1 == asyncio.run(task(1))
