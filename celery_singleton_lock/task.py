"""The task class that users take as a base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from celery.app.task import Task
from celery.exceptions import Ignore

from celery_singleton_lock.config.foreign import refuse_keywords
from celery_singleton_lock.config.options import LockFrom, LockUntil, OnLockLost, OnStoreError
from celery_singleton_lock.config.task_config import (
    config_for,
    has_problems,
    headers_with,
    note_problem,
    note_problems,
    refuse_wrong,
)
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.attempt import attempt_of
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER
from celery_singleton_lock.errors import ConfigurationError, DuplicateTask, LockLost, TooManyStarts
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import NO_LEASE, Lease
from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.policies import Policy, PolicyName
from celery_singleton_lock.publish import is_locked_at_publish, publish
from celery_singleton_lock.result import SingletonResult
from celery_singleton_lock.worker.awaitable import problem_of_async
from celery_singleton_lock.worker.wrapping import defined_in, install, users_call


class SingletonMixin:
    """Holds the lock of a call while its body runs.

    Put the mixin before any task class: ``class Base(SingletonMixin, DjangoTask)``. `SingletonTask` does that for `celery.Task`.

    An option is a class attribute. Where it is None, the app setting ``singleton_`` + its name counts, else the default.

    Options:
        singleton: `False` makes a plain task; Celery's own `celery.*` tasks are always plain, so
            `Celery(task_cls=SingletonTask)` works. Default: `True`.
        unique_on: names of the parameters that make the lock key; `[]`: the task name alone; `"x"` means `["x"]`.
            Default: all arguments.
        lock_key: makes the lock key instead of `unique_on`: a template with plain parameter names (`"{account}"`),
            or a callable that gets the arguments by name, defaults filled in, and returns a `str` of at most 1 KiB.
            Default: none.
        lock_group: a name instead of the task name in the key: tasks of one group with equal values of `unique_on` or
            `lock_key`, one of which is needed, exclude each other. Default: none.
        lock_limit: how many tasks with one lock key may run at once, from 1; or a callable that gets the arguments as
            `lock_key` does, and returns that number. Default: `1`.
        on_duplicate: `"skip"`, `"retry"`, `"raise"`, `"wait"`, `"join"`, `"run_once_more"`, `"replace"`, a policy
            object, or a callable `(task, holder) -> policy`. Default: `"skip"`.
        lock_from: when the lock is acquired: at the `"start"` of the body, or at `"publish"`. Default: `"start"`.
        lock_until: when the lock is released: at the `"finish"` of the body, or at its `"start"` (only with
            `lock_from="publish"`). Default: `"finish"`.
        lock_ttl: seconds that a lease outlives a vanished holder, from 1 to a year; it is renewed every third of
            that. Default: `30.0`.
        lock_at_least: seconds for which a success keeps the lock held, counted from the start of the body.
            Default: `0.0`.
        lock_at_most: seconds after which the lease of a body that still runs is lost, from 1 to a year; above
            `lock_at_least`. Default: none.
        on_lock_lost: `"warn"`, or `"raise"`: `LockLost` is raised inside the body. Default: `"warn"`.
        on_store_error: if the store is unreachable when a task starts: `"retry"` later, for an hour in all, `"run"`
            unprotected with a warning, or `"raise"`. Default: `"retry"`.
        max_starts: a number of crashed starts a day, or a `MaxStarts`, after which a delivery fails with
            `TooManyStarts`. Default: none.
    """

    singleton: bool | None = None
    unique_on: str | Sequence[str] | None = None
    lock_key: str | Callable[..., str] | None = None
    lock_group: str | None = None
    lock_limit: int | Callable[..., int] | None = None
    on_duplicate: PolicyName | Policy | Callable[..., Any] | None = None
    lock_from: LockFrom | None = None
    lock_until: LockUntil | None = None
    lock_ttl: float | None = None
    lock_at_least: float | None = None
    lock_at_most: float | None = None
    on_lock_lost: OnLockLost | None = None
    on_store_error: OnStoreError | None = None
    max_starts: int | MaxStarts | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = [base for base in cls.__mro__ if base in (Task, SingletonMixin)]
        if Task not in order and {"name", "run"} <= vars(cls).keys():  # a task, not another mixin
            cls.__bases__ = (*cls.__bases__, Task)  # a task that can be bound, and is refused as others are
            note_problem(
                cls,
                f"task {vars(cls)['name']}: SingletonMixin is no task class: use base=SingletonTask, or combine the two"
                " as class Base(SingletonMixin, YourTask)",
            )
        if order[0] is Task:
            raise ConfigurationError(f"{cls.__qualname__}: SingletonMixin must come before the other task class")

    @classmethod
    def bind(cls: Any, app: Any) -> Any:
        """Bind the class to an app, as Celery does for each task, and check its options.

        If one cannot be used, each use of the task raises `ConfigurationError`, and so does a worker that starts.
        """
        bound = super().bind(app)  # type: ignore[misc]
        # `Celery.register_task` names a task without a name after this call. A base class without `run` is no task.
        is_task = cls.name or defined_in(cls, "run") is not Task
        name = cls.name or app.gen_task_name(cls.__name__, cls.__module__)
        if not is_task or name.startswith("celery."):
            return bound
        is_plain = cls.singleton is False
        note_problems(cls, name, "" if is_plain else problem_of_async(name, users_call(cls) or cls.run))
        if not is_plain or has_problems(cls):
            throws = cls.throws if isinstance(cls.throws, (tuple, list)) else (cls.throws,) if cls.throws else ()
            cls.throws = (*throws, *(error for error in (DuplicateTask, TooManyStarts) if error not in throws))
            install(cls)
            # By name, as a publisher should not import it.
            app.steps["worker"].add("celery_singleton_lock.worker.bootstep:SingletonStep")
        return bound

    def delay(self, *args: Any, **kwargs: Any) -> SingletonResult:
        """Publish the task with these arguments: `apply_async` without options."""
        result: SingletonResult = super().delay(*args, **kwargs)  # type: ignore[misc]
        return result

    def apply_async(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> SingletonResult:
        """Publish the task, as `celery.Task.apply_async` does; with ``lock_from="publish"``, acquire its lock first.

        The attribute `duplicate` of what it returns is the `Holder` that the call met, or None.

        Arguments:
            lock_options: options for this call alone: a dict of `on_duplicate`, `lock_ttl`, `lock_key`, `on_lock_lost`
                and `on_store_error`.

        Raises:
            ConfigurationError: one of them, or of the task's own, cannot be used, or an option of the task is given outside
                of `lock_options`.
            DuplicateTask: the lock is held, and the policy lets duplicates fail.
            StoreError: the lock could not be acquired, and `on_store_error` or the store's refusal says so.
        """
        _move_to_headers(self, options)
        send = partial(super().apply_async, args, kwargs, *more, **options)  # type: ignore[misc]
        # Celery's tracer publishes a linked callback with a `parent_id`; an error of ours would fail the parent.
        is_alone = options.get("task_id") is None and options.get("parent_id") is None
        if not more and is_alone and is_locked_at_publish(self):
            return publish(self, args or (), kwargs or {}, options, send)
        result: SingletonResult = send()
        if result is not None:  # as a task class of the user's may return
            result.duplicate = None
        return result

    def apply(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task in this process, as `celery.Task.apply` does; `lock_options` is as for `apply_async`."""
        _move_to_headers(self, options)
        return super().apply(args, kwargs, *more, **options)  # type: ignore[misc]

    def retry(self: Any, args: Any = None, kwargs: Any = None, exc: Any = None, *more: Any, **options: Any) -> Any:
        """Retry the task, as `celery.Task.retry` does.

        Raises:
            LockLost: it was given as `exc`, because a newer message replaces the task (`Replace`).
        """
        attempt = attempt_of(self)
        if isinstance(exc, LockLost) and attempt and attempt.state and attempt.state.is_stopped_by(exc):
            raise exc
        if attempt and attempt.identity:  # which the retry has in common with this message
            headers = options.get("headers") or self.request.headers or {}
            options["headers"] = {**headers, RETRY_STATE_HEADER: {"identity": attempt.identity}}
        return super().retry(args, kwargs, exc, *more, **options)  # type: ignore[misc]

    def replace(self: Any, *args: Any, **kwargs: Any) -> Any:
        """End this task with another one that takes its id, as `celery.Task.replace` does. The lock ends with this body.

        Raises:
            Ignore: the replacement was published.
        """
        try:
            return super().replace(*args, **kwargs)  # type: ignore[misc]
        except Ignore:
            if attempt := attempt_of(self):
                attempt.is_replaced = True
            raise

    @property
    def lease(self: Any) -> Lease:
        """The lock of the body that runs now; one that is not `protected` outside of a body."""
        attempt = attempt_of(self)
        return attempt.lease if attempt else NO_LEASE

    def lock_key_for(self, *args: Any, **kwargs: Any) -> str:
        """Return the lock key of a call with these arguments.

        Raises:
            TypeError: they do not fit the task.
            LockKeyError: one of them has no stable form.
            ConfigurationError: there is no store, or the task's options cannot be used.
        """
        return config_for(self).lock_keys(args, kwargs)[0]

    def lock_holder(self: Any, *args: Any, **kwargs: Any) -> Holder | None:
        """Return who holds the lock of a call with these arguments, the oldest of several holders; None: nobody.

        An operator's pause (`locks.pause`) is not seen.

        Raises:
            StoreError: the store is unreachable, or refused.
        """
        return context_of(self.app).store.holder(*config_for(self).lock_keys(args, kwargs))

    def force_unlock(self: Any, *args: Any, **kwargs: Any) -> Holder | None:
        """Release the lock of a call, whoever holds it, the oldest of several, who is notified; return who that was.

        The starts that were counted for `max_starts` are forgotten, also if nobody holds the lock.

        Raises:
            StoreError: the store is unreachable, or refused.
        """
        config = config_for(self)
        starts = config.starts_key(args, kwargs)
        return context_of(self.app).store.revoke(config.base, *config.lock_keys(args, kwargs), starts)

    def start_strategy(self: Any, app: Any, consumer: Any, **kwargs: Any) -> Any:
        """Have each delivery get a token, and delayed copies be kept. Celery calls this in a worker for each of its tasks."""
        # Imported here, as a publisher needs neither.
        from celery_singleton_lock.line.copies import copies_of
        from celery_singleton_lock.worker.request import request_class

        if not getattr(type(self).__call__, "_singleton", False):
            return super().start_strategy(app, consumer, **kwargs)  # type: ignore[misc]
        self.Request = request_class(self.Request, app, consumer)
        strategy = super().start_strategy(app, consumer, **kwargs)  # type: ignore[misc]
        return copies_of(app).handler(self, consumer, strategy)


class SingletonTask(SingletonMixin, Task):  # type: ignore[misc]
    __doc__ = SingletonMixin.__doc__  # `help` shows no docstrings of base classes

    abstract = True


def _move_to_headers(task: Any, options: dict[str, Any]) -> None:
    """Check the options of one call, and put them into a header, which retries and republished messages keep."""
    refuse_wrong(task)
    refuse_keywords(task.name, options)
    given = options.pop("lock_options", None)
    if given is not None:
        options["headers"] = headers_with(task, options.get("headers"), given)
