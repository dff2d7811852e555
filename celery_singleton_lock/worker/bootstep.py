"""The step of a worker's start and stop: it has everything checked, and opens and ends what a worker has beside its bodies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import celery
from celery import bootsteps
from celery.signals import worker_process_shutdown, worker_shutdown
from click import ClickException

from celery_singleton_lock.clock import now
from celery_singleton_lock.context import REGISTER_INTERVAL, ProcessContext, context_of
from celery_singleton_lock.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.line.copies import end_copies
from celery_singleton_lock.line.handover import HandOver
from celery_singleton_lock.log import logger
from celery_singleton_lock.native import CallbackRunner
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.worker import control, execution  # noqa: F401 - its command; before the pool forks
from celery_singleton_lock.worker.checks import check_delays, check_results, check_store, checked_options
from celery_singleton_lock.worker.discarded import WAITING, WaitingMessages, watch
from celery_singleton_lock.worker.failures import FailureChannel
from celery_singleton_lock.worker.request import is_prefork

#: The newest Celery in the test matrix (tox.ini).
NEWEST_CELERY = (5, 7)
#: Seconds until the names of the tasks are sent again to a store that was unreachable.
_RETRY_INTERVAL = 5.0


class CannotStart(ConfigurationError, ClickException):
    """A `ConfigurationError` that the `celery` command shows without a traceback before it exits with 1."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.args = problems


class SingletonStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks settings and options when a worker is made, and the store when it starts.

    Raises:
        ConfigurationError: there is no store that all bodies share, or a setting or option cannot be used.
    """

    label = "singleton locks"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        prefork = is_prefork(parent.pool_cls)
        try:
            self._options = checked_options(parent.app, parent.pool_cls)
        except ConfigurationError as error:
            raise CannotStart(*error.problems) from None
        # Only prefork with an event loop: the consumer of other workers waits for the broker alone.
        self._handover = HandOver(parent.app) if prefork and getattr(parent, "use_eventloop", False) else None
        self._failures = FailureChannel(context_of(parent.app)) if prefork else None
        self._waiting: WaitingMessages | None = None
        worker_process_shutdown.connect(_report_counts)
        worker_shutdown.connect(_report_counts)
        # Here, and not at the start: the processes of a pool, which are made before that, shall know that the store has worked.
        check_store(context_of(parent.app), self._names())

    def start(self, parent: Any) -> None:
        settings = context_of(parent.app).settings
        logger.info("Singleton locks in %s (from %s): %s", settings.shown_url, settings.url_name, self._ttls())
        if celery.VERSION[:2] > NEWEST_CELERY:
            text = (
                "Celery %d.%d is newer than %d.%d, the newest that this version of celery_singleton_lock is tested with"
            )
            logger.warning(text, *celery.VERSION[:2], *NEWEST_CELERY)
        check_delays(self._options, parent.app.conf)
        check_results(self._options, parent.app.conf)
        if getattr(parent, "consumer", None) is not None:
            watch(parent.consumer)
        if self._failures:
            self._failures.listen()
        context_of(parent.app).outages.tell = partial(_send_event, parent, CallbackRunner())
        self._waiting = WaitingMessages(context_of(parent.app).events.loop_failed)
        parent.app.__dict__[WAITING] = self._waiting
        self._register_tasks(context_of(parent.app))

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Called by Celery when the consumer's loop begins, or begins anew."""
        if self._handover:
            self._handover.listen(parent.consumer, hub)

    def stop(self, parent: Any) -> None:
        """Called when a worker stops, before its pool does: bodies go on, and what follows them is for other workers."""
        if self._handover:
            self._handover.close(parent.hub)
            self._handover = None
        if self._failures:
            self._failures.end()
            self._failures = None
        if self._waiting:
            self._waiting.end()
        end_copies(parent.app)

    terminate = stop

    def _register_tasks(self, context: ProcessContext) -> None:
        """Add the names of tasks and groups to those that the store knows, as soon as it can be reached."""
        tasks = self._names()
        if tasks and context.settings.url != "memory://":
            store = context.store.clone()  # greenlets and this thread cannot share a connection
            loop = BackgroundLoop(
                partial(_add_tasks, store, context.settings.prefix, tasks), context.events.loop_failed
            )
            loop.wake(now())

    def _names(self) -> dict[str, str]:
        """Return the names of the tasks, each with that of its locks."""
        return {name: options.lock_group or name for name, options in self._options.items() if options.singleton}

    def _ttls(self) -> str:
        """Return the names of the tasks for each `lock_ttl`."""
        names: dict[float, list[str]] = {}
        for name, options in sorted(self._options.items()):
            names.setdefault(options.lock_ttl, []).append(name)
        return "; ".join(f"lock_ttl {ttl:g} s for {', '.join(names[ttl])}" for ttl in sorted(names)) or "no task"


def _report_counts(sender: Any = None, **_: Any) -> None:
    """Called at the end of a worker's processes. The main process names the worker, one of a pool does not."""
    context_of(getattr(sender, "app", None) or celery.current_app).report_counts()


def _send_event(worker: Any, callbacks: CallbackRunner, event: str, fields: Mapping[str, Any]) -> None:
    """Have a worker event sent by another thread than that of log lines and signals: the broker may be away, too.

    The worker's own dispatcher knows whether events are wanted, and keeps them for a broker that is away.
    """
    dispatcher = getattr(worker.consumer, "event_dispatcher", None)
    if dispatcher is not None:
        callbacks.call(partial(dispatcher.send, event, **fields))


def _add_tasks(store: LockStore, prefix: str, tasks: Mapping[str, str]) -> float:
    """Try once; return when to do so again."""
    try:
        store.records().add_tasks(f"{prefix}:tasks", tasks)
    except StoreUnavailable:
        return now() + _RETRY_INTERVAL
    except StoreError as error:  # `check_store` has warned if it refuses all
        logger.info("The store of locks does not list the tasks of this worker: %s", error)
    finally:
        store.close()
    return now() + REGISTER_INTERVAL
