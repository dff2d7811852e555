"""Checks settings, options and the store when a worker starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import celery
from celery import bootsteps
from celery.utils.time import maybe_timedelta
from click import ClickException

from celery_singleton_lock.clock import now
from celery_singleton_lock.config.exclusions import different_limits
from celery_singleton_lock.config.options import Options, spelling
from celery_singleton_lock.config.problems import Problems
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import REGISTER_INTERVAL, ProcessContext, context_of
from celery_singleton_lock.delivery.delays import longest_delay, visibility_timeout
from celery_singleton_lock.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.keys.canonical import escaped
from celery_singleton_lock.line.copies import end_copies
from celery_singleton_lock.line.handover import HandOver
from celery_singleton_lock.log import logger
from celery_singleton_lock.native import CallbackRunner
from celery_singleton_lock.policies import RetryLater
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.worker import control  # noqa: F401 - registers its command
from celery_singleton_lock.worker.discarded import WAITING, WaitingMessages, watch
from celery_singleton_lock.worker.failures import FailureChannel
from celery_singleton_lock.worker.join import refuse_unreadable_results
from celery_singleton_lock.worker.request import is_prefork

#: The newest Celery in the test matrix (tox.ini).
NEWEST_CELERY = (5, 7)
#: Seconds until the names of the tasks are sent again to a store that was unreachable.
_RETRY_INTERVAL = 5.0
#: Seconds. Under a visibility timeout that is shorter, a long line keeps workers busy.
_SHORT_TIMEOUT = 60.0
#: For how many names of tasks the store is tried. A node of a cluster that has half of all keys refuses one of so many.
_CHECKED_NAMES = 16


def singleton_tasks(app: Any) -> list[Any]:
    """Return the tasks of an app that have the options of this library."""
    return [task for task in list(app.tasks.values()) if getattr(type(task).__call__, "_singleton", False)]


def options_of(task: Any) -> Options:
    """Return the options of a task that a worker may run.

    Raises:
        ConfigurationError: an option cannot be used, alone or in this app.
    """
    options = config_for(task).options
    if getattr(options.on_duplicate, "reads_result", False):
        refuse_unreadable_results(task)
    return options


def options_of_tasks(app: Any, problems: Problems) -> dict[str, Options]:
    """Return the options of an app's singleton tasks, by name; collect what cannot be used."""
    found = {}
    for task in singleton_tasks(app):
        with problems:
            found[task.name] = options_of(task)
    return found


def _checked(app: Any, pool: Any) -> dict[str, Options]:
    """Return the options of the tasks of a worker with this class of pool.

    Raises:
        ConfigurationError: naming all settings and options that cannot be used.
    """
    problems, prefork = Problems(), is_prefork(pool)
    if str(pool.__module__).startswith("celery_aio_pool"):
        reason = "calls tasks in a thread that does not see their request, so no task would be locked: use another pool"
        problems.add([f"celery-aio-pool {reason}"])
    with problems:
        if context_of(app, single=prefork).settings.url == "memory://" and prefork:
            raise ConfigurationError(
                f"{spelling(app.conf, 'singleton_lock_url')}='memory://' locks nothing under prefork, where each child has "
                "its own memory: use another pool, or the URL of a Redis server"
            )
    options = options_of_tasks(app, problems)
    problems.add(different_limits(options))
    problems.refuse()
    return options


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
            self._options = _checked(parent.app, parent.pool_cls)
        except ConfigurationError as error:
            raise CannotStart(*error.problems) from None
        # Only prefork with an event loop: the consumer of other workers waits for the broker alone.
        self._handover = HandOver(parent.app) if prefork and getattr(parent, "use_eventloop", False) else None
        self._failures = FailureChannel(context_of(parent.app)) if prefork else None
        self._waiting: WaitingMessages | None = None
        # Here, and not at the start: the processes of a pool, which are made before that, shall know that the store has worked.
        _check_store(context_of(parent.app), self._names())

    def start(self, parent: Any) -> None:
        settings = context_of(parent.app).settings
        logger.info("Singleton locks in %s (from %s): %s", settings.shown_url, settings.url_name, self._ttls())
        if celery.VERSION[:2] > NEWEST_CELERY:
            text = (
                "Celery %d.%d is newer than %d.%d, the newest that this version of celery_singleton_lock is tested with"
            )
            logger.warning(text, *celery.VERSION[:2], *NEWEST_CELERY)
        self._check_delays(parent.app.conf)
        self._check_results(parent.app.conf)
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

    def _check_delays(self, conf: Any) -> None:
        """Warn if a time is too long for the broker: see `longest_delay`."""
        timeout, longest = visibility_timeout(conf), longest_delay(conf)
        shortened, outlived, waiting = [], [], []
        for name, options in sorted(self._options.items()):
            policy = options.on_duplicate
            if isinstance(policy, RetryLater) and policy.max_delay * (1 + policy.jitter) > longest:
                shortened.append(name)
            if options.lock_ttl > timeout:
                outlived.append(name)
            if timeout < _SHORT_TIMEOUT and getattr(policy, "uses_line", False):
                waiting.append(name)
        if shortened:
            logger.warning(
                "RetryLater's delays are cut to %g s, the longest for which a worker keeps a message, for the tasks %s",
                longest, ", ".join(shortened),
            )  # fmt: skip
        if waiting:
            logger.warning(
                "The broker's visibility timeout is %g s: each message that waits in line is published again every %g s, "
                "for the tasks %s", timeout, longest, ", ".join(waiting),
            )  # fmt: skip
        if outlived:
            logger.warning(
                "The broker's visibility timeout is %g s, and lock_ttl is longer for the tasks %s: "
                "after a worker died, a redelivered message waits for the rest of lock_ttl",
                timeout, ", ".join(outlived),
            )  # fmt: skip

    def _check_results(self, conf: Any) -> None:
        """Warn if results expire before holds whose duplicates end with them."""
        expires = maybe_timedelta(conf.result_expires)
        lost = [
            name
            for name, options in sorted(self._options.items())
            if expires and options.lock_at_least > expires.total_seconds()
            if options.lock_from == "publish" or getattr(options.on_duplicate, "reads_result", False)
        ]
        if lost:
            logger.warning(
                "result_expires is %g s, and lock_at_least is longer for the tasks %s: "
                "their duplicates find no result of the run before them",
                expires.total_seconds(), ", ".join(lost),
            )  # fmt: skip


def _send_event(worker: Any, callbacks: CallbackRunner, event: str, fields: Mapping[str, Any]) -> None:
    """Have a worker event sent by another thread than that of log lines and signals: the broker may be away, too.

    The worker's own dispatcher knows whether events are wanted, and keeps them for a broker that is away.
    """
    dispatcher = getattr(worker.consumer, "event_dispatcher", None)
    if dispatcher is not None:
        callbacks.call(partial(dispatcher.send, event, **fields))


def _check_store(context: ProcessContext, tasks: Mapping[str, str]) -> None:
    """Log what keeps tasks from using the store, or the store from keeping locks."""
    try:
        for name in sorted({*tasks.values()})[:_CHECKED_NAMES]:
            context.store.check(f"{context.settings.prefix}:{{{escaped(name)}}}")
        concerns = _concerns(context)
    except StoreUnavailable as error:
        return logger.warning("The store of locks cannot be used now: %s", error)
    except StoreError as error:
        return logger.error("The store of locks refuses this worker, so singleton tasks will fail: %s", error)
    finally:
        context.store.close()  # no connection is inherited by forked processes
    for concern in concerns:
        logger.warning("%s", concern)


def _concerns(context: ProcessContext) -> list[str]:
    """Return how the store may lose locks."""
    settings, store = context.settings, context.store
    try:
        found = [problem_of(store.eviction_policy())]
        if settings.is_by_sentinel and not settings.replicas and (count := store.unsafe_replicas()):
            found.append(
                f"The store of locks has replicas ({count}), and grants locks before they have them: after a failover, two "
                "tasks may have one lock. Set singleton_lock_replicas and singleton_lock_grace, or min-replicas-to-write "
                "on the servers"
            )
    except StoreError as error:  # a login may be allowed to run scripts, but not INFO
        logger.info("The store of locks does not show its maxmemory-policy: %s", error)
        return []
    return [concern for concern in found if concern]


def _add_tasks(store: LockStore, prefix: str, tasks: Mapping[str, str]) -> float:
    """Try once; return when to do so again."""
    try:
        store.records().add_tasks(f"{prefix}:tasks", tasks)
    except StoreUnavailable:
        return now() + _RETRY_INTERVAL
    except StoreError as error:  # `_check_store` has warned if it refuses all
        logger.info("The store of locks does not list the tasks of this worker: %s", error)
    finally:
        store.close()
    return now() + REGISTER_INTERVAL


def problem_of(eviction_policy: str) -> str:
    """Return what is wrong with a store's eviction policy, "" if nothing is."""
    if eviction_policy in ("", "noeviction"):
        return ""
    return f"The store of locks may drop locks when it is full: its maxmemory-policy is {eviction_policy}"
