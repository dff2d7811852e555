"""What one process holds for one app: its store, its renewal thread, and in a prefork main process its supervisor."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import Any

from celery_singleton_lock.clock import now
from celery_singleton_lock.config.options import Settings
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.native import CallbackRunner
from celery_singleton_lock.renewal.body import BodyRenewal
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.reports.events import EventLogger
from celery_singleton_lock.reports.outage import Outages
from celery_singleton_lock.reports.tally import Tally
from celery_singleton_lock.store.access import Access
from celery_singleton_lock.store.protocol import LockStore

#: Seconds until the name of a task is sent again, as the store may have lost its data.
REGISTER_INTERVAL = 60.0
#: Seconds until what a process has counted is written to the store.
REPORT_INTERVAL = 10.0


class ProcessContext:
    """Made at first use in a process, and anew after a fork. Nothing connects and no thread starts before it is needed.

    Arguments:
        settings: of the app.
        single: whether at most one body runs at a time here, so that connections need no limit.
        store: used instead of the one that the settings name.
    """

    def __init__(self, settings: Settings, single: bool = False, store: LockStore | None = None) -> None:
        self.pid = os.getpid()
        self.settings = settings
        limit = None if single else max(1, settings.pool_limit - 1)
        self.callbacks = CallbackRunner()
        self.tally = Tally(self._report_soon)
        self.outages = Outages(settings.shown_url, self._write, self.callbacks.call)
        self.events = EventLogger(self.callbacks, self.tally, self.outages)
        self.access = Access(self.events.refused)
        self.store = store or open_store(settings, limit, self.access)
        self._watch = BackgroundLoop(self.outages.look, self.events.loop_failed)
        self.outages.wake = self._watch.wake
        self._reporter = BackgroundLoop(self._look, self.events.loop_failed)
        self._report_at = math.inf
        self.loops = [self._watch, self._reporter]  # they end with the context
        # Renewal does not wait for connections of bodies.
        self._renewal_store = self.store.clone() if limit else self.store
        self.body_renewal = BodyRenewal(self._renewal_store, self.store, self.events)
        self.renewer: Renewer[LeaseState] = Renewer(self._renewal_store, self.body_renewal, self.events.loop_failed)
        self._keeps_records = settings.stats and settings.url != "memory://"
        self._registered: dict[str, float] = {}  # name of a task -> when its name was last taken to the store
        self.supervisor: Any = None
        self.children_forward: Any = None  # in a prefork main process, `Outages.forward` of its children

    def _write(self) -> None:
        """Write a key that expires, to learn whether the store takes writes: one that is full, or a replica, answers reads."""
        store = self.store.clone()  # greenlets and a thread cannot share a connection
        try:
            store.check(f"{self.settings.prefix}:{{}}")
        finally:
            store.close()

    def _report_soon(self) -> None:
        self._report_at = now() + REPORT_INTERVAL
        self._reporter.wake(self._report_at)

    def _look(self) -> float:
        """Report if it is time for that; return when it is. The loop also looks when it is woken."""
        if self._report_at <= now():
            self._report_at = math.inf
            self.report_counts()
        return self._report_at

    def report_counts(self) -> None:
        """Write what this process has counted to the store. What that does not take is counted for the next time."""
        taken = dict(self.tally.take())
        if not (taken and self._keeps_records):
            return
        store = self.store.clone()  # greenlets and threads cannot share a connection
        try:
            while taken:
                base = next(iter(taken))
                store.records().count(base, taken[base])
                del taken[base]
        except StoreError:
            for base, counted in taken.items():
                self.tally.add(base, counted)
        finally:
            store.close()

    def register(self, name: str, owner: str) -> None:
        """Add a task that is published with its lock to those that the store knows, at most once a minute; `owner`: of its locks.

        Perhaps no worker has this task. A name that cannot be added is missing from lists alone.
        """
        time = now()
        if self.settings.url == "memory://" or time < self._registered.get(name, -math.inf) + REGISTER_INTERVAL:
            return
        self._registered[name] = time
        with suppress(StoreError):
            self.store.records().add_tasks(f"{self.settings.prefix}:tasks", {name: owner})

    def end(self) -> None:
        """End the threads of a context that no body uses any more, and close its connections."""
        self.renewer.end()
        for loop in self.loops:
            loop.end()
        self.callbacks.end()
        self._renewal_store.close()
        self.store.close()


def open_store(settings: Settings, limit: int | None, access: Access | None = None) -> LockStore:
    """Return the store that the settings name, with at most so many connections at once; it connects at first use."""
    if settings.url == "memory://":
        from celery_singleton_lock.store.memory import MemoryStore

        return MemoryStore()
    from celery_singleton_lock.store.redis import RedisStore, connector

    try:
        connect = connector(settings.url, settings.options, settings.tls, settings.store_timeout)
    except ConfigurationError as error:  # a store does not know how the app spells its settings
        raise ConfigurationError(str(error).replace("singleton_lock_url", settings.url_name)) from None
    history = settings.history if settings.stats else None
    return RedisStore(connect, settings.store_timeout, limit, history, access, settings.replicas, settings.grace)


def context_of(app: Any, single: bool = False) -> ProcessContext:
    """Return the context of an app in this process; `single` counts when it is made.

    Raises:
        ConfigurationError: the app's settings cannot be used.
    """
    found: ProcessContext | None = app.__dict__.get(_attribute())
    return found or app.__dict__.setdefault(_attribute(), _new_context(app, single))


def _new_context(app: Any, single: bool) -> ProcessContext:
    context = ProcessContext(settings_of(app.conf), single)
    # That of the process which has forked this one is there, too.
    parents = [one for one in list(vars(app).values()) if isinstance(one, ProcessContext)]
    context.access.has_worked = any(
        one.access.has_worked for one in parents if one.settings.url == context.settings.url
    )
    for forward in [one.children_forward for one in parents if one.children_forward]:
        context.outages.forward = forward
    return context


def replace_context(app: Any, context: ProcessContext | None) -> ProcessContext | None:
    """Use another context in this process from now on, None: a new one at next use; return the one before."""
    before: ProcessContext | None = app.__dict__.pop(_attribute(), None)
    if context is not None:
        app.__dict__[_attribute()] = context
    return before


def _attribute() -> str:
    return f"_celery_singleton_lock_{os.getpid()}"  # a forked process has its own
