"""Checks that a worker makes when it starts: of settings and options, of the store, and of times that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.utils.time import maybe_timedelta

from celery_singleton_lock.config.exclusions import different_limits
from celery_singleton_lock.config.options import Options, spelling
from celery_singleton_lock.config.problems import Problems
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.delivery.delays import longest_delay, visibility_timeout
from celery_singleton_lock.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.keys.canonical import escaped
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies import RetryLater
from celery_singleton_lock.worker.join import refuse_unreadable_results
from celery_singleton_lock.worker.request import is_prefork

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


def checked_options(app: Any, pool: Any) -> dict[str, Options]:
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


def check_delays(found: Mapping[str, Options], conf: Any) -> None:
    """Warn if a time is too long for the broker: see `longest_delay`."""
    timeout, longest = visibility_timeout(conf), longest_delay(conf)
    shortened, outlived, waiting = [], [], []
    for name, options in sorted(found.items()):
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


def check_results(found: Mapping[str, Options], conf: Any) -> None:
    """Warn if results expire before holds whose duplicates end with them."""
    expires = maybe_timedelta(conf.result_expires)
    lost = [
        name
        for name, options in sorted(found.items())
        if expires and options.lock_at_least > expires.total_seconds()
        if options.lock_from == "publish" or getattr(options.on_duplicate, "reads_result", False)
    ]
    if lost:
        logger.warning(
            "result_expires is %g s, and lock_at_least is longer for the tasks %s: "
            "their duplicates find no result of the run before them",
            expires.total_seconds(), ", ".join(lost),
        )  # fmt: skip


def check_store(context: ProcessContext, tasks: Mapping[str, str]) -> None:
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
    found: list[str] = []
    try:
        found.append(problem_of(store.eviction_policy()))
        if settings.is_by_sentinel and not settings.replicas and (count := store.unsafe_replicas()):
            found.append(
                f"The store of locks has replicas ({count}), and grants locks before they have them: after a failover, two "
                "tasks may have one lock. Set singleton_lock_replicas and singleton_lock_grace, or min-replicas-to-write "
                "on the servers"
            )
    except StoreError as error:  # a login may be allowed to run scripts, but not INFO
        logger.info("The store of locks does not show its %s: %s", "replicas" if found else "maxmemory-policy", error)
    return [concern for concern in found if concern]


def problem_of(eviction_policy: str) -> str:
    """Return what is wrong with a store's eviction policy, "" if nothing is."""
    if eviction_policy in ("", "noeviction"):
        return ""
    return f"The store of locks may drop locks when it is full: its maxmemory-policy is {eviction_policy}"
