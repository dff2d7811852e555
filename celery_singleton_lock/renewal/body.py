"""What renewal means for the leases of bodies that run in this process: the deadline moves, or the lease is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.lease import LeaseState
from celery_singleton_lock.native import native_lock
from celery_singleton_lock.reports.events import EventLogger
from celery_singleton_lock.store.protocol import LockStore, RenewResult


class BodyRenewal:
    """Handles the renewals of bodies in this process.

    `verify` asks `body_store`: the threads of bodies do not share connections with the renewal thread.
    """

    def __init__(
        self, store: LockStore, body_store: LockStore, events: EventLogger, clock: Callable[[], float] = now
    ) -> None:
        self._store = store
        self._body_store = body_store
        self._events = events
        self._clock = clock
        self._mutex = native_lock()
        self._reachable = True  # so that each outage is reported once

    def answered(self, lease: LeaseState, result: RenewResult, sent_at: float) -> None:
        """Renew, reacquire or lose the lease, as the store says."""
        self._reachable = True
        if lease.ended:
            return
        if result in (RenewResult.RENEWED, RenewResult.STOP):
            lease.renewed(sent_at)
            self._events.renewed(lease)
            if lease.lost:
                self._events.learned(lease, was_alone=True)
            if result is RenewResult.STOP:
                self._stop(lease)
        elif result is RenewResult.MISSING:
            if self._clock() >= lease.deadline:
                self._mark_lost(lease)
            self._reacquire(lease)
        else:
            self._superseded(lease, result)

    def failed(self, leases: Sequence[LeaseState], error: StoreError, sent_at: float) -> None:
        """Plan another try: after a failure half way to the deadline, two more tries of ttl / 6 fit.

        The last try is sent past the deadline. A call that took more than twice its timeout was probably starved by the GIL.
        It does not count as a failed renewal where the supervisor renews as well, for at most one TTL.
        """
        time = self._clock()
        self._events.not_renewed(leases, error)
        for lease in leases:
            ttl = lease.spec.ttl
            starved = lease.spec.supervised and time - sent_at > ttl / 3
            if sent_at >= lease.deadline + (ttl if starved else 0.0):
                self._mark_lost(lease)
            retry = time + lease.shortened(ttl / 12)
            lease.due = retry if lease.lost else min(retry, max(time, lease.deadline))
        if self._reachable:
            self._reachable = False
            self._events.unreachable(leases[0], error)

    def stopped(self, lease: LeaseState) -> None:
        """Lose a lease whose body outlived its option ``lock_at_most``."""
        if not lease.ended and self._clock() >= lease.cap:
            self._mark_lost(lease, "lock_at_most")

    def verify(self, lease: LeaseState) -> bool:
        """Ask the store about a lease past its deadline; called by its body."""
        sent_at = self._clock()
        if sent_at >= lease.cap:
            self._mark_lost(lease, "lock_at_most")
            return False
        try:
            [result] = self._body_store.renew([lease.spec], lease.call_timeout(sent_at))
        except StoreError as error:
            self.failed([lease], error, sent_at)
        else:
            if result is RenewResult.MISSING:  # the renewal thread will reacquire it
                self._mark_lost(lease)
            else:
                self.answered(lease, result, sent_at)
        return lease.held

    def _reacquire(self, lease: LeaseState) -> None:
        lease.reacquired = True  # first: if the body ends meanwhile, its release is repeated after this call
        sent_at = self._clock()
        if not lease.is_active(sent_at):
            return
        try:
            result, is_new = self._store.reacquire(lease.spec, lease.fence, max(0.01, lease.call_timeout(sent_at)))
        except StoreError as error:
            self.failed([lease], error, sent_at)
            return
        if result in (RenewResult.RENEWED, RenewResult.LOST):
            lease.renewed(sent_at)
        if result is RenewResult.RENEWED:
            self._events.learned(lease, was_alone=True)
        else:
            self._superseded(lease, result)
        if is_new and not lease.ended:
            self._events.reacquired(lease)

    def _superseded(self, lease: LeaseState, result: RenewResult) -> None:
        """Another delivery has the lock, or had it meanwhile, or an operator released the lock."""
        if result is RenewResult.REVOKED:
            lease.unreleased = False
        elif result is RenewResult.NOT_OWNER:  # its owner may end soon: then it is reacquired, so that newcomers wait
            lease.due = self._clock() + lease.spec.ttl / 12
        self._mark_lost(lease, "released_by_operator" if result is RenewResult.REVOKED else "not_owner")
        if result is not RenewResult.REVOKED:
            self._events.learned(lease, was_alone=False)

    def _stop(self, lease: LeaseState) -> None:
        with self._mutex:
            was_told = lease.stopped or lease.lost or lease.ended
            lease.stopped = lease.stopped or not was_told
        if not was_told:
            self._interrupt(lease)
            self._events.replaced(lease)

    def _mark_lost(self, lease: LeaseState, reason: str = "expired") -> None:
        with self._mutex:  # the renewal thread and a body in `ensure` may come to it at once
            was_told, lease.lost = lease.stopped or lease.lost or lease.ended, True
            lease.loss = lease.loss or reason
        if not was_told:
            self._interrupt(lease)
            self._events.lost(lease, reason)

    def _interrupt(self, lease: LeaseState) -> None:
        if lease.interrupt is not None:
            lease.interrupt.fire()
