"""What a worker does for singleton tasks while it runs: names deliveries, and tells of those to prefork children."""

from __future__ import annotations

from typing import Any

import celery
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.log import logger
from celery_singleton_lock.store.protocol import LeaseRequest
from celery_singleton_lock.worker.delivery import PROPERTY, new_token
from celery_singleton_lock.worker.execution import ask_for_after_run


def prepare(app: Any) -> None:
    """Called for each singleton task that is bound: an app that has none is left as it is."""
    app.steps["worker"].add(
        "celery_singleton_lock.worker.bootstep:SingletonStep"
    )  # by name: a publisher does not import it
    if celery.VERSION < (5, 7):  # there a tracer may look at a list of receivers that takes no more
        ask_for_after_run()


def is_prefork(pool: Any) -> bool:
    """Whether this is the pool of processes, or its class."""
    from celery.concurrency.prefork import TaskPool

    return isinstance(pool, TaskPool) or (isinstance(pool, type) and issubclass(pool, TaskPool))


class DeliveryMixin:
    """Names each delivery; of those to prefork children, tells the watcher which child has which."""

    watcher: Any = None

    def __init__(self: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)  # type: ignore[call-arg]
        eventer, request = self._eventer, self._request_dict
        events = bool(eventer and eventer.enabled and self.task.send_events)
        self._token = new_token()
        attempt = self._token, message.content_type, events, self.watcher is not None
        request["properties"] = {**(request.get("properties") or {}), PROPERTY: attempt}

    def on_accepted(self: Any, pid: int, time_accepted: float) -> None:
        """Called in the main process when a child has begun."""
        super().on_accepted(pid, time_accepted)  # type: ignore[misc]
        if self.watcher is not None:
            try:
                self.watcher.accepted(pid, config_for(self.task).options.lock_ttl, self._claim, self._is_going)
            except Exception:  # an error here would leave the message without an acknowledgement
                logger.exception("Task %s[%s] is not watched by the main process", self.name, self.id)

    def _claim(self: Any, pid: int) -> LeaseRequest:
        """Of this attempt, which a child has; what it is called with is not looked at here."""
        plan = config_for(self.task)
        return LeaseRequest(
            plan.base, "", self._token, plan.options.lock_ttl, self.id, self.hostname or "", pid, supervised=True
        )

    def _is_going(self: Any) -> bool:
        """Whether the pool still waits for the end (`Request._apply_result` is private to Celery: may be missing)."""
        reference = getattr(self, "_apply_result", None)
        if reference is None:
            return True
        result = reference()
        return result is not None and not result.ready()


def request_class(base: Any, app: Any, consumer: Any) -> Any:
    """The request class of a task, or the user's own, combined with ours."""
    base = symbol_by_name(base)  # type: ignore[no-untyped-call]
    is_ours = issubclass(base, DeliveryMixin)
    watcher = context_of(app, single=True).watcher if is_prefork(consumer.pool) else None
    if is_ours and base.watcher is watcher:
        return base
    return type(base.__name__, (base,) if is_ours else (DeliveryMixin, base), {"watcher": watcher})
