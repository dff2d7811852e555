"""Helps to test your own tasks without Redis: a store in memory, locks held by another task, and assertions::

    with memory_store(app):
        with locked(sync_account, 42):
            assert sync_account.apply((42,)).get() is None  # a duplicate, skipped
        assert_free(sync_account, 42)

Without `memory_store`, the locks are in the store of your settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.config.task_config import config_for, forget_configs
from celery_singleton_lock.context import ProcessContext, context_of, replace_context
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.task import SingletonMixin

_CHANGED = {"singleton_lock_url": "memory://", "singleton_lock_eager": True}


@contextmanager
def memory_store(app: Any) -> Iterator[None]:
    """Keep the locks of this app in memory, with none held at first, and use locks in eager runs, too."""
    earlier = {name: app.conf.get(name) for name in _CHANGED}
    app.conf.update(_CHANGED)
    context = ProcessContext(Settings("memory://"))
    earlier_context = replace_context(app, context)
    forget_configs(app)
    try:
        yield
    finally:
        replace_context(app, earlier_context)
        context.end()
        app.conf.update(earlier)
        forget_configs(app)


@contextmanager
def locked(task: Any, *args: Any, **kwargs: Any) -> Iterator[Holder]:
    """Hold the lock of a call, as another task would. With a `lock_limit`, that is one of so many: nest it to hold more.

    Raises:
        AssertionError: the lock is already held, by as many as may.
        TypeError: the task uses no lock.
    """
    _refuse_plain(task)
    config, store = config_for(task), context_of(task.app).store
    digest, token = config.digest(args, kwargs), os.urandom(16).hex()
    limit = config.limit(args, kwargs)
    task_id = f"held-by-test-{uuid4()}" if limit else "held-by-test"  # one id twice would be a redelivery
    spec = LeaseSpec(config.base, digest, token, 3600.0, task_id, "test", os.getpid(), limit=limit)
    result = store.acquire(spec)
    assert result.status is AcquireStatus.GRANTED, f"{spec.lock} is held by {result.holder}"
    try:
        yield Holder(spec.task_id, spec.node, spec.pid, 0.0, spec.ttl)
    finally:
        publish_next(task.app, store.release(spec, success=False).message)


def assert_held(task: Any, *args: Any, **kwargs: Any) -> Holder:
    """Check that a call's lock is held; return its holder.

    Raises:
        AssertionError: the lock is free.
        TypeError: the task uses no lock.
    """
    _refuse_plain(task)
    holder: Holder | None = task.lock_holder(*args, **kwargs)
    assert holder is not None, f"{task.lock_key_for(*args, **kwargs)} is free"
    return holder


def assert_free(task: Any, *args: Any, **kwargs: Any) -> None:
    """Check that nobody holds a call's lock.

    Raises:
        AssertionError: the lock is held.
        TypeError: the task uses no lock.
    """
    _refuse_plain(task)
    holder = task.lock_holder(*args, **kwargs)
    assert holder is None, f"{task.lock_key_for(*args, **kwargs)} is held by {holder}"


def _refuse_plain(task: Any) -> None:
    name = getattr(task, "name", task)
    if not isinstance(task, SingletonMixin):
        raise TypeError(f"{name} uses no lock: it is not a task with the base SingletonTask")
    if name.startswith("celery."):
        raise TypeError(f"{name} uses no lock: Celery's own tasks are always plain")
    if not config_for(task).options.singleton:
        raise TypeError(f"{name} uses no lock: its option singleton is False")
