"""What a worker's main process does for each delivery: gives it a token, and tells the supervisor which child runs it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from celery.exceptions import Terminated
from celery.states import SUCCESS
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER
from celery_singleton_lock.config.task_config import TaskConfig, config_for, config_of_call
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery.ending import revoke_successors
from celery_singleton_lock.delivery.properties import PROPERTY, identity_of, mapping_of, new_token
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, retry_state_of
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.line.joining import leave_line
from celery_singleton_lock.log import about
from celery_singleton_lock.reservation import RESERVATION_HEADER, free_reservation, reservation, reservation_of
from celery_singleton_lock.store.requests import LeaseSpec
from celery_singleton_lock.worker.celery_internals import OwnReason, context_of_request, is_running, sends_events
from celery_singleton_lock.worker.discarded import WAITING, WaitingMessages
from celery_singleton_lock.worker.redelivery import stored_state
from celery_singleton_lock.worker.supervisor import Supervisor

#: Headers of a message that stands for an earlier one with its task id.
_SUCCESSORS = (RETRY_STATE_HEADER, "retries", "replaced_task_nesting")
_KEEPS = "keeps its reservation or its place in line: %s"


def is_prefork(pool: Any) -> bool:
    """Tell whether this is the pool of processes, or its class."""
    from celery.concurrency.prefork import TaskPool

    return isinstance(pool, TaskPool) or (isinstance(pool, type) and issubclass(pool, TaskPool))


class DeliveryMixin(OwnReason):
    """Extends `celery.worker.request.Request`."""

    supervisor: Supervisor | None = None
    child_lease: LeaseSpec | None = None  # of the child that has begun it
    replacement: str = ""  # task id of the message for which this one was terminated (`Replace`)

    def __init__(self: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)  # type: ignore[call-arg]
        request = self.request_dict
        self._token = new_token()
        identity = self._identity(message.body)
        delivery = self._token, message.content_type, sends_events(self), self.supervisor is not None, identity
        request["properties"] = {**mapping_of(request.get("properties")), PROPERTY: delivery}
        waiting: WaitingMessages | None = self.task.app.__dict__.get(WAITING)
        may_have_lock = self.eta or RESERVATION_HEADER in request  # an own retry waits for its countdown
        if waiting and may_have_lock:
            waiting.add(self)

    def _identity(self: Any, body: Any) -> str:
        """Return the identity of the message, if it may wait in line for the one holder of a lock; else "".

        What is published for an earlier message carries the identity of that one, or none.
        """
        request = self.request_dict
        if any(map(request.get, _SUCCESSORS)):
            return ""
        try:
            options = config_for(self.task).options
            uses_line = getattr(options.on_duplicate, "uses_line", False) or LOCK_OPTIONS_HEADER in request
            return identity_of(self.id, body) if uses_line and not options.is_limited else ""
        except Exception:  # the task is refused when it starts; an error here would end the worker
            return ""

    def on_accepted(self: Any, pid: int, time_accepted: float) -> None:
        """Called in the main process when a child has begun."""
        super().on_accepted(pid, time_accepted)  # type: ignore[misc]
        if self.supervisor is not None:
            try:
                self.child_lease = self._lease_request(pid)
                self.supervisor.accepted(pid, self.child_lease, self, self._config().options.lock_at_most)
            except Exception:  # an error here would leave the message without an acknowledgement
                about(self, self.id, self.lock_key()).exception("has a lock that the supervisor cannot renew")

    def revoked(self: Any) -> bool:
        """Tell whether the message was revoked or has expired; then its reservation and its place in line end."""
        state = retry_state_of(self.request_dict)
        is_revoked = bool(super().revoked())  # type: ignore[misc]
        if is_revoked:
            try:
                self.free_reservation()
                if state.ticket:
                    leave_line(self.task, self._config(), state, self.args, self.kwargs)
            except StoreError as error:
                context_of(self.task.app).outages.log(about(self, self.id, self.lock_key()), _KEEPS, error)
            except Exception as error:  # it expires
                about(self, self.id, self.lock_key()).warning(_KEEPS, error)
        return is_revoked

    def reject(self: Any, requeue: bool = False) -> None:
        """Reject the message; one that no worker has begun, and that does not come again, frees its reservation."""
        super().reject(requeue)  # type: ignore[misc]
        if not requeue and self.time_start is None:
            self.free_reservation()

    def free_reservation(self: Any) -> None:
        """Release the reservation of a message that no worker will start, if it has one; another thread does that."""
        app, spec = self.task.app, reservation_of(self.request_dict, context_of(self.task.app).settings.prefix)
        if spec is None:  # an own retry may have one that no publisher has named
            config = self._config()
            if not config.options.singleton:
                return
            spec = reservation(config, self.id, self.args, self.kwargs, config.options.lock_ttl)
        free_reservation(app, spec, self.publish_next)

    def terminate_replaced(self: Any, pool: Any, replacement: str) -> None:
        """Terminate the task for a newer message. What would have followed is revoked once its body is over.

        Raises:
            NotImplementedError: the pool cannot do that.
        """
        self.replacement = replacement
        self.terminate(pool)
        if self.supervisor is None:  # a greenlet is told to end, and may still clean up; a process is not reaped yet
            self._revoke_successors()

    def reason(self, reason: str) -> str:
        return f"replaced by task {self.replacement}" if self.replacement else reason

    def on_failure(self: Any, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Called in the main process when a task has failed, or its child has died."""
        answer = super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if self.replacement and isinstance(error, (Terminated, SystemExit)):
            self._revoke_successors()
        return answer

    def _revoke_successors(self: Any) -> None:
        """Store REVOKED for what would have followed, unless the body has returned all the same."""
        if stored_state(self.task, self) == SUCCESS:
            return
        try:
            revoke_successors(self.task, context_of_request(self))
        except Exception as error:  # the result backend
            about(self, self.id).warning("could not revoke what would have followed: %s", error)

    def lock_key(self: Any) -> str:
        """Return the key of the message's lock: that of slot 0 until a child's lease is renewed; "" if none can be made."""
        if self.child_lease and self.child_lease.lock:
            return str(self.child_lease.lock)
        with suppress(Exception):  # arguments that do not fit, or a function of the user's
            return str(self._config().lock_keys(self.args, self.kwargs)[0])
        return ""

    def _config(self: Any) -> TaskConfig:
        return config_of_call(self.task, self.request_dict.get(LOCK_OPTIONS_HEADER))

    def log_death(self: Any, pid: int) -> None:
        """Log that the child has died, whose lock is released."""
        about(self, self.id, self.lock_key()).info("has died with pool process %d, its lock is released", pid)

    def publish_next(self: Any, message: str) -> None:
        """Have the next in line published by another thread: the one that renews calls this."""
        context_of(self.task.app).callbacks.call(partial(publish_next, self.task.app, message))

    def _lease_request(self: Any, pid: int) -> LeaseSpec:
        config = self._config()
        ttl, limit = config.options.lock_ttl, int(config.options.is_limited)  # its height is not looked at
        return LeaseSpec(
            config.base, "", self._token, ttl, self.id, self.hostname or "", pid, supervised=True, limit=limit
        )

    def is_unfinished(self: Any) -> bool:
        """Tell whether the pool still waits for the end."""
        return is_running(self)


def request_class(base: Any, app: Any, consumer: Any) -> Any:
    """Return the request class of a task, or the user's own, combined with ours."""
    base = symbol_by_name(base)  # type: ignore[no-untyped-call]
    is_ours = issubclass(base, DeliveryMixin)
    supervisor = _supervisor_of(app) if is_prefork(consumer.pool) else None
    if is_ours and base.supervisor is supervisor:
        return base
    return type(base.__name__, (base,) if is_ours else (DeliveryMixin, base), {"supervisor": supervisor})


def _supervisor_of(app: Any) -> Supervisor:
    context = context_of(app, single=True)
    context.supervisor = context.supervisor or Supervisor(
        context.store, context.events.loop_failed, on_failure=context.outages.heard
    )
    return context.supervisor  # type: ignore[no-any-return]
