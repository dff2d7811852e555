"""What a worker does for singleton tasks when it starts."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies import RetryLater
from celery_singleton_lock.worker.republish import longest_delay, visibility_timeout
from celery_singleton_lock.worker.request import is_prefork


class SingletonStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks settings and options when a worker is made, and looks at the store when it starts.

    Raises:
        ConfigurationError: there is no store that all bodies share, or a setting or option cannot be used.
    """

    label = "singleton locks"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        prefork = is_prefork(parent.pool_cls)
        runtime = context_of(parent.app, single=prefork)
        if prefork and runtime.settings.url == "memory://":
            raise ConfigurationError(
                "singleton_lock_url='memory://' locks nothing under prefork, where each child has a memory of its own: "
                "use another pool, or the URL of a Redis"
            )
        self._options = {
            task.name: config_for(task).options
            for task in list(parent.app.tasks.values())
            if getattr(type(task).__call__, "_singleton", False)
        }

    def start(self, parent: Any) -> None:
        self._compare_with_visibility_timeout(parent.app.conf)
        self._look_at_store(parent)

    def _compare_with_visibility_timeout(self, conf: Any) -> None:
        """Warn of times that are too long for the broker, which delivers a waiting message again after its visibility timeout."""
        timeout, longest = visibility_timeout(conf), longest_delay(conf)
        delayed, outlived = [], []
        for name, options in self._options.items():
            policy = options.on_duplicate
            if isinstance(policy, RetryLater) and policy.max_delay * (1 + policy.jitter) > longest:
                delayed.append(name)
            if options.lock_ttl > timeout:
                outlived.append(name)
        if delayed:
            logger.warning(
                "The broker's visibility timeout is %g s: RetryLater's delays are cut to %g s for the tasks %s",
                timeout, longest, ", ".join(sorted(delayed)),
            )  # fmt: skip
        if outlived:
            logger.warning(
                "The broker's visibility timeout is %g s, and lock_ttl is longer for the tasks %s: when a worker dies, a message "
                "that is delivered again waits for the rest of lock_ttl",
                timeout, ", ".join(sorted(outlived)),
            )  # fmt: skip

    def _look_at_store(self, parent: Any) -> None:
        """Log what keeps tasks from using the store, or the store from keeping locks."""
        runtime = context_of(parent.app, single=is_prefork(parent.pool_cls))
        try:
            runtime.store.holder(f"{runtime.settings.prefix}:{{}}:lock:")  # by a script, as tasks use the store
        except StoreUnavailable as error:
            logger.warning("The store of locks cannot be reached for now: %s", error)
            return
        except StoreError as error:
            logger.error(
                "The store of locks refuses this worker, and singleton tasks fail until that is mended: %s", error
            )
            return
        try:
            policy = runtime.store.eviction_policy()
        except StoreError as error:  # a login may run scripts and not INFO
            logger.info("The store of locks does not tell its maxmemory-policy: %s", error)
            return
        if policy not in ("", "noeviction"):
            logger.warning(
                "The store of locks may drop them when its memory is full: its maxmemory-policy is %s", policy
            )
