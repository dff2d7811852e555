"""For tests of your own tasks, without Redis: a store in memory, a lock held by "someone else", and assertions.

with memory_store(app):
    with hold(sync_account, 42):
        assert sync_account.apply((42,)).result is None  # a duplicate, skipped
    assert_free(sync_account, 42)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.config.task_config import config_for, forget_configs
from celery_singleton_lock.context import ProcessContext, context_of, replace_context
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest
from celery_singleton_lock.task import SingletonMixin

_CHANGED = {"singleton_lock_url": "memory://", "singleton_lock_eager": True}


@contextmanager
def memory_store(app: Any) -> Iterator[None]:
    """Keep the locks of this process in memory, empty at first, and take them in eager runs too.

    Arguments:
        app: the Celery app.
    """
    earlier = {name: app.conf.get(name) for name in _CHANGED}
    app.conf.update(_CHANGED)
    runtime = ProcessContext(Settings("memory://"))
    before = replace_context(app, runtime)
    forget_configs(app)
    try:
        yield
    finally:
        replace_context(app, before)
        runtime.end()
        app.conf.update(earlier)
        forget_configs(app)


@contextmanager
def hold(task: Any, *args: Any, **kwargs: Any) -> Iterator[Holder]:
    """Hold the lock of a call, as another task would.

    Arguments:
        task: a singleton task.
        args, kwargs: the call.

    Raises:
        AssertionError: it is held already.
        TypeError: the task takes no lock.
    """
    _refuse_plain(task)
    plan = config_for(task)
    claim = LeaseRequest(
        plan.base, plan.digest(args, kwargs), os.urandom(16).hex(), 3600.0, "held-by-test", "test", os.getpid()
    )
    store = context_of(task.app).store
    verdict = store.acquire(claim)
    assert verdict.answer is AcquireStatus.GRANTED, f"{claim.lock} is held by {verdict.holder}"
    try:
        yield Holder(claim.task_id, claim.node, claim.pid, 0.0, claim.ttl)
    finally:
        store.release(claim, success=False)


def assert_held(task: Any, *args: Any, **kwargs: Any) -> Holder:
    """The holder of a call's lock.

    Raises:
        AssertionError: it is free.
        TypeError: the task takes no lock.
    """
    _refuse_plain(task)
    holder: Holder | None = task.lock_holder(*args, **kwargs)
    assert holder is not None, f"{task.lock_key_for(*args, **kwargs)} is free"
    return holder


def assert_free(task: Any, *args: Any, **kwargs: Any) -> None:
    """Check that nobody holds a call's lock.

    Raises:
        AssertionError: it is held.
        TypeError: the task takes no lock.
    """
    _refuse_plain(task)
    holder = task.lock_holder(*args, **kwargs)
    assert holder is None, f"{task.lock_key_for(*args, **kwargs)} is held by {holder}"


def _refuse_plain(task: Any) -> None:
    name = getattr(task, "name", task)
    if not isinstance(task, SingletonMixin):
        raise TypeError(f"{name} takes no lock: it is no task with the base SingletonTask")
    if name.startswith("celery."):
        raise TypeError(f"{name} takes no lock: Celery's own tasks are always plain")
    if not config_for(task).options.singleton:
        raise TypeError(f"{name} takes no lock: its option singleton is False")
