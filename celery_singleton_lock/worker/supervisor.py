"""The supervisor: in a prefork worker's main process, renews the leases of its children, and releases those of dead ones.

It knows which delivery each child runs, and the store knows which lock that delivery has. So it needs no word from a child, which
may keep the GIL, be stopped, or be dead. It cannot reacquire what the store has lost: the child does, when it can.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.renewal.pending import PendingRelease
from celery_singleton_lock.renewal.renewer import Renewer
from celery_singleton_lock.store.protocol import LockStore, RenewResult
from celery_singleton_lock.store.requests import LeaseSpec

POLL = 0.5  # seconds after which children are looked at whose death the system does not report, and new ones


class ChildDelivery(Protocol):
    """A delivery that a child runs, as the main process knows it."""

    def is_unfinished(self) -> bool:
        """Tell whether the pool still waits for its end."""

    def publish_next(self, message: str) -> None:
        """Have the message of the next in line published, in another thread."""

    def log_death(self, pid: int) -> None:
        """Log that the child has died."""


@dataclass(eq=False)
class ChildLease:
    """The lease that a child may have for its present delivery."""

    spec: LeaseSpec  # without a digest, as the main process does not look at arguments
    delivery: ChildDelivery
    due: float
    cap: float = math.inf  # not renewed from then on
    revoked: bool = False  # the child finds out for itself

    def is_active(self, time: float) -> bool:
        return not self.revoked and time < self.cap and self.delivery.is_unfinished()

    def call_timeout(self, time: float) -> float:
        return self.spec.ttl / 6


@dataclass(eq=False)
class _Child:
    handle: int  # can be read once the process is dead (`os.pidfd_open`); -1 where there is none
    lease: ChildLease


class Supervisor:
    """Renews a lease while the pool waits for its delivery's end, and releases it when the child is dead.

    Celery reports a hard time limit before the child has exited. From then on the supervisor neither renews nor releases; the
    child renews for itself, and releases if it can.
    """

    def __init__(
        self,
        store: LockStore,
        on_error: Callable[..., object],
        clock: Callable[[], float] = now,
        on_failure: Callable[[str, StoreError], object] = lambda verb, error: None,
    ) -> None:
        self._clock = clock
        self._on_failure = on_failure  # called when a call fails
        self._renewer: Renewer[ChildLease] = Renewer(store, self, on_error, clock, self._not_released)
        self._children: dict[int, _Child] = {}
        self._mutex = threading.Lock()
        self._loop = BackgroundLoop(self.watch_children, on_error, clock)

    def accepted(self, pid: int, spec: LeaseSpec, delivery: ChildDelivery, at_most: float | None = None) -> None:
        """Note that a child has begun this delivery, and so has finished its earlier one; renew for `at_most` seconds."""
        time = self._clock()
        lease = ChildLease(spec, delivery, time + spec.ttl / 3)
        if at_most is not None:
            lease.cap = time + at_most
        with self._mutex:
            child = self._children.get(pid)
            if child is None:
                self._children[pid] = _Child(_open(pid), lease)
                self._loop.wake(self._clock())
            else:
                self._renewer.remove(child.lease)
                child.lease = lease
        self._renewer.add(lease)

    def answered(self, lease: ChildLease, result: RenewResult, sent_at: float) -> None:
        """Renew again in time; soon where another delivery has the lock, as the child may reacquire it."""
        lease.due = sent_at + lease.spec.ttl / (12 if result is RenewResult.NOT_OWNER else 3)
        lease.revoked = result is RenewResult.REVOKED

    def failed(self, leases: Sequence[ChildLease], error: StoreError, sent_at: float) -> None:
        """Try again soon; the children report it."""
        logger.debug("Locks of pool processes could not be renewed: %s", error)
        self._on_failure("renew", error)
        for lease in leases:
            lease.due = self._clock() + lease.spec.ttl / 12

    def _not_released(self, error: StoreError) -> None:
        logger.debug("Locks of dead pool processes could not be released yet: %s", error)
        self._on_failure("release", error)

    def stopped(self, lease: ChildLease) -> None:
        """Do nothing: the child finds out for itself."""

    def watch_children(self) -> float:
        """Wait a moment for children to die, and have the leases of those released; return when to do so again."""
        with self._mutex:
            children = dict(self._children)
        poll = select.poll()
        for child in children.values():
            if child.handle >= 0:
                poll.register(child.handle, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(POLL * 1000)}
        for pid, child in children.items():
            if child.handle in ready or (child.handle < 0 and not _exists(pid)):
                self._child_died(pid, child)
        return self._clock() if self._children else math.inf

    def _child_died(self, pid: int, child: _Child) -> None:
        with self._mutex:
            del self._children[pid]
        if child.handle >= 0:
            os.close(child.handle)
        lease, delivery = child.lease, child.lease.delivery
        pending = PendingRelease(lease.spec, success=False, outcome=False, publish=delivery.publish_next)
        self._renewer.remove(lease)
        self._renewer.release_later(pending)
        if delivery.is_unfinished():
            delivery.log_death(pid)
        else:  # as after a hard time limit, or at the end of a child that has released it
            text = "Pool process %d has ended: the lock of its last task, %s, is released now if it was not before"
            logger.debug(text, pid, lease.spec.task_id)


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on this system, or dead already
        return -1


def _exists(pid: int) -> bool:
    try:  # a dead process counts until the pool has reaped it
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
