"""What one process holds for one app: its store, its renewal thread, and in a prefork main process its watcher."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.events import EventLogger
from celery_singleton_lock.native import CallbackRunner, patched_by
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.protocol import LockStore

if TYPE_CHECKING:  # a publisher needs neither watcher nor store
    from celery_singleton_lock.worker.supervisor import Supervisor

_ATTRIBUTE = "_celery_singleton_lock"


class ProcessContext:
    """Made at first use in a process, and anew after a fork; nothing connects, and no thread starts, before it is needed.

    Arguments:
        settings: the app's.
        single: this process runs one body at a time, or none, so one connection is enough.
        store: use this store instead of the one that the settings name.
    """

    def __init__(self, settings: Settings, single: bool = False, store: LockStore | None = None) -> None:
        self.pid = os.getpid()
        self.settings = settings
        limit = 1 if single else max(1, settings.pool_limit - bool(patched_by()))
        #: For the threads of bodies.
        self.store = store or open_store(settings, limit)
        self.hub = CallbackRunner()
        # The renewal thread shares connections with bodies, but not where those wait for one in greenlets.
        own = self.store.clone(1) if patched_by() else self.store
        self.renewer = Renewer(own, self.store, self.hub, EventLogger(self.hub))

    @cached_property
    def watcher(self) -> Supervisor:
        """For the main process of a prefork worker, whose worker step asks for it first."""
        from celery_singleton_lock.worker.supervisor import Supervisor

        return Supervisor(self.store)

    def end(self) -> None:
        """End the threads of a runtime that no body uses any more, and close its connections."""
        self.renewer.end()
        self.hub.end()
        self.store.close()

    def forget(self) -> None:
        """Give up file descriptors that came with a fork."""
        watcher = self.__dict__.pop("watcher", None)
        if watcher is not None:
            watcher.close()


def open_store(settings: Settings, limit: int) -> LockStore:
    """The store that the settings name; it connects when it is first used.

    Arguments:
        settings: the app's.
        limit: how many connections it may have.
    """
    if settings.url == "memory://":
        from celery_singleton_lock.store.memory import MemoryStore

        return MemoryStore()
    from celery_singleton_lock.store.redis import RedisStore, connector

    connect = connector(settings.url, settings.options, settings.tls, settings.store_timeout)
    return RedisStore(connect, settings.store_timeout, limit)


def context_of(app: Any, single: bool = False) -> ProcessContext:
    """The runtime of an app in this process.

    Arguments:
        app: a Celery app.
        single: see `ProcessContext`; counts when it is made.

    Raises:
        ConfigurationError: the app's settings cannot be used.
    """
    found: ProcessContext | None = app.__dict__.get(_ATTRIBUTE)
    if found is not None and found.pid == os.getpid():
        return found
    made = ProcessContext(settings_of(app.conf), single)
    if found is None:
        return app.__dict__.setdefault(_ATTRIBUTE, made)  # type: ignore[no-any-return]
    found.forget()
    app.__dict__[_ATTRIBUTE] = made
    return made


def replace_context(app: Any, runtime: ProcessContext | None) -> ProcessContext | None:
    """Use another runtime in this process from now on, None: a new one at next use; answers the one before."""
    before: ProcessContext | None = app.__dict__.pop(_ATTRIBUTE, None)
    if runtime is not None:
        app.__dict__[_ATTRIBUTE] = runtime
    return before
