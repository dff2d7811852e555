"""What a worker does for singleton tasks when it starts."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from celery_singleton_lock.attempt import share_secret
from celery_singleton_lock.board import Board
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import logger
from celery_singleton_lock.plan import plan_of
from celery_singleton_lock.runtime import runtime_of
from celery_singleton_lock.worker import is_prefork


class SingletonStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks settings and options when a worker is made, and looks at the store when it starts.

    Raises:
        ConfigurationError: there is no store, or a setting or option cannot be used.
    """

    label = "singleton locks"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        prefork = is_prefork(parent.pool_cls)
        runtime = runtime_of(parent.app, single=prefork)
        if (
            prefork and runtime.board is None and runtime.settings.url != "memory://"
        ):  # there the store is each process's own
            runtime.board = Board()
        if prefork:
            share_secret()
        for task in list(parent.app.tasks.values()):
            if getattr(type(task).__call__, "_singleton", False):
                plan_of(task)

    def start(self, parent: Any) -> None:
        runtime = runtime_of(parent.app, single=is_prefork(parent.pool_cls))
        try:
            policy = runtime.store.eviction_policy()
        except StoreError as error:
            logger.warning("The store of locks cannot be used for now: %s", error)
            return
        if policy not in ("", "noeviction"):
            logger.warning(
                "The store of locks may drop them when its memory is full: its maxmemory-policy is %s", policy
            )
