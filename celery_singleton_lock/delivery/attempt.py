"""One delivery of a message in the process that handles it: what `worker` and `line` pass on, and find on the request."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.config.options import Options
from celery_singleton_lock.config.task_config import TaskConfig
from celery_singleton_lock.context import ProcessContext
from celery_singleton_lock.delivery.properties import Delivery, delivery_of
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState, retry_state_of
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import NO_LEASE, LeaseState
from celery_singleton_lock.log import TaskLog, about
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.requests import LeaseSpec

#: Attribute of a request: its `Attempt`. It is there from before the lock is acquired until `task_postrun`.
ATTEMPT = "_singleton_attempt"


class Attempt:
    """One delivery: of a task's message, or of the delayed copy that stands for it while it waits in line.

    The attributes without a value here are set on the way to the lock: a run that uses no lock does not come so far.
    """

    config: TaskConfig
    options: Options  # of the task and the call
    context: ProcessContext  # of this process
    store: LockStore  # of the context, or one of its own for a thread that handles copies
    spec: LeaseSpec
    delivery: Delivery

    def __init__(self, task: Any = None, request: Any = None) -> None:
        self.task = task
        self.request = request  # Celery's
        self.retry_state = RetryState() if request is None else retry_state_of(request)
        self.lease = NO_LEASE  # what the body sees
        self.state: LeaseState | None = None  # of the lease; None where no lock is acquired
        self.pending: PendingRelease | None = None  # a release that needs the outcome of the task
        self.is_replaced = False  # its task has published another one with its id (`Task.replace`)
        self.next_message = ""  # of the next in line, as the release has named it

    def __reduce__(self) -> tuple[type[Attempt], tuple[()]]:
        """Make copies and pickles empty: a copied request has nothing to release, and no token."""
        return Attempt, ()

    def use(self, config: TaskConfig) -> None:
        """Take the options of the task and the call."""
        self.config, self.options = config, config.options

    @property
    def ignores_result(self) -> bool:
        """As `celery.app.task.get_actual_ignore_result` (5.7) says: the default of the request's class does not count."""
        asked = self.request.__dict__.get("ignore_result")
        return bool(self.task.ignore_result if asked is None else asked)

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier delivery of the same message may be running, or has run."""
        info, state = self.request.delivery_info or {}, self.retry_state
        return bool(info.get("redelivered")) or state.redelivery_checks > 0 or state.is_unfinished

    @property
    def ticket(self) -> str:
        """The ticket of the message's place in line; empty if it does not wait there."""
        return (self.spec.place or self.retry_state).ticket

    @property
    def identity(self) -> str:
        """The identity of its message; empty if nothing tells it from another one with its task id."""
        return self.retry_state.identity or delivery_of(self.request).identity

    def log(self, holder: Holder | None = None) -> TaskLog:
        """Return what logs about this delivery; `holder`: who has the lock instead."""
        return about(self.task, self.request.id, self.spec.lock, holder)

    def note(self, **changes: Any) -> None:
        """Have the request, and what is published again for it, carry these fields of the retry state from now on."""
        self.retry_state = self.retry_state._replace(**changes)
        setattr(self.request, RETRY_STATE_HEADER, self.retry_state._asdict())


def attempt_of(task: Any) -> Attempt | None:
    """Return the attempt that a task runs in now, in this process; None outside of one."""
    return getattr(task.request_stack.top, ATTEMPT, None)
