"""Puts the lock around a task class's own code: what the tracer calls runs under it, however a subclass overrides it."""

from __future__ import annotations

from typing import Any

from celery.app.task import Task
from celery.exceptions import TaskPredicate

from celery_singleton_lock.config.task_config import refuse_wrong
from celery_singleton_lock.delivery.attempt import ATTEMPT, attempt_of
from celery_singleton_lock.worker.celery_internals import get_current_task, protect


def install(cls: Any) -> None:
    """Put the lock around `__call__` and `before_start`, even where a subclass overrides them without ``super()``."""
    if not getattr(cls.__dict__.get("__call__"), "_singleton", False):
        cls.__call__ = _wrapped(cls)
    if defined_in(cls, "before_start") is not Task and not hasattr(cls.__dict__.get("before_start"), "_singleton"):
        cls.before_start = _inside(cls.before_start)


def defined_in(cls: Any, name: str) -> Any:
    """Return the class, this one or a base, that defines an attribute."""
    return next(base for base in cls.__mro__ if name in vars(base))


def users_call(cls: Any) -> Any:
    """Return the `__call__` that a user has put around `run`, or None."""
    return getattr(cls.__call__, "_original", None if defined_in(cls, "__call__") is Task else cls.__call__)


def _wrapped(cls: Any) -> Any:
    """Return what the tracer calls: it runs the body under the lock, unless user code calls it."""
    original = users_call(cls)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        from celery_singleton_lock.worker.execution import run_locked  # here, as a publisher does not need it

        refuse_wrong(self)
        request = self.request_stack.top
        call = original or Task.__call__
        # A task may share its stack of requests with a base class, whose body calls it. Names are compared, as New Relic makes
        # a proxy of the task the current one.
        current = get_current_task()
        is_of_another = current is not None and current.name != self.name
        if request is None or request.called_directly or is_of_another or hasattr(request, ATTEMPT):
            return call(self, *args, **kwargs)

        has_begun = False

        def body() -> Any:
            nonlocal has_begun
            has_begun = True
            self.before_start(request.id, args, kwargs)
            if original is not None:
                return original(self, *args, **kwargs)
            protect(request)
            return self.run(*args, **kwargs)

        try:
            return run_locked(self, request, args, kwargs, body)
        except TaskPredicate as answer:
            if has_begun:
                raise
            raise answer.with_traceback(None)  # noqa: B904 - the tracer spends 0.1 to 0.2 ms on each frame

    wrapper._singleton = True  # type: ignore[attr-defined]
    wrapper._original = original  # type: ignore[attr-defined]
    return wrapper


def _inside(original: Any) -> Any:
    """Return a `before_start` that does nothing when the tracer calls it, before the lock is acquired."""

    def before_start(self: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if attempt_of(self):
            original(self, task_id, args, kwargs)

    before_start._singleton = True  # type: ignore[attr-defined]
    return before_start
