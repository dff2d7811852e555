"""Refuses bodies that return an awaitable: their work would begin when the lock has been released already."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.errors import ConfigurationError

_ADVICE = (
    "so its work would go on without its lock: let it run to its end, as asyncio.run() does, in run or in __call__"
)


def problem_of_async(name: str, called: Any) -> str:
    """Return what is wrong with the function that the tracer calls, if that is an ``async def``, else ""."""
    is_async = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    return f"task {name}: {getattr(called, '__name__', 'run')} is an async def, {_ADVICE}" if is_async else ""


def completed(task: Any, body: Callable[[], Any]) -> Any:
    """Return what a body returns.

    Raises:
        ConfigurationError: it is an awaitable, whose work is ended as far as that is possible.
    """
    result = body()
    if not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return result
    if inspect.iscoroutine(result):
        result.close()
    elif asyncio.isfuture(result):
        result.cancel()
    kind = type(result).__qualname__
    raise ConfigurationError(f"task {task.name}: its body returned an awaitable of type {kind}, {_ADVICE}")
