"""The renewal engine: one thread renews all leases of a process, and retries its pending releases.

A lease is renewed every third of its TTL. What a result means is decided by a handler: `renewal.body` for bodies of this process,
`worker.supervisor` for those of prefork children.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.renewal.loop import BackgroundLoop
from celery_singleton_lock.renewal.pending import PendingRelease, PendingReleases
from celery_singleton_lock.store.protocol import LockStore, RenewResult
from celery_singleton_lock.store.requests import LeaseSpec

BATCH = 100  # leases per call


class Renewable(Protocol):
    """A lease that is renewed."""

    spec: LeaseSpec
    due: float

    def is_active(self, time: float) -> bool:
        """Tell whether it is still to be renewed at this time."""

    def call_timeout(self, time: float) -> float:
        """Return how many seconds a call to renew it may take."""


L = TypeVar("L", bound=Renewable)
L_contra = TypeVar("L_contra", bound=Renewable, contravariant=True)


class RenewalHandler(Protocol[L_contra]):
    """Decides what a renewal's result means, and sets when the lease is due next."""

    def answered(self, lease: L_contra, result: RenewResult, sent_at: float) -> None:
        """Handle the store's answer."""

    def failed(self, leases: Sequence[L_contra], error: StoreError, sent_at: float) -> None:
        """Handle a call that failed."""

    def stopped(self, lease: L_contra) -> None:
        """Handle a lease that is not renewed any more."""


class Renewer(Generic[L]):
    """Renews the leases of one process.

    `on_error` is called with unexpected errors, and with the spec of the lease that one is about; `on_unreleased` when the store
    does not answer a pending release.
    """

    def __init__(
        self,
        store: LockStore,
        handler: RenewalHandler[L],
        on_error: Callable[..., object],
        clock: Callable[[], float] = now,
        on_unreleased: Callable[[StoreError], object] = lambda error: None,
    ) -> None:
        self._store = store
        self._handler = handler
        self._clock = clock
        self._leases: dict[str, L] = {}
        self._pending = PendingReleases(store, on_error, clock, on_unreleased)
        self._planned = math.inf  # when the thread renews next
        self._loop = BackgroundLoop(self.renew_due, on_error, clock)

    def add(self, lease: L) -> None:
        """Renew this lease from now on."""
        self._leases[lease.spec.token] = lease
        if lease.due < self._planned:
            self._loop.wake(lease.due)
            self._planned = lease.due

    def remove(self, lease: L) -> None:
        """Renew this lease no more."""
        self._leases.pop(lease.spec.token, None)

    def leases(self) -> list[L]:
        """Return the leases that are renewed now."""
        return list(self._leases.values())

    def release_later(self, pending: PendingRelease, unanswered: bool = False) -> None:
        """Release a lease as soon as the store can be reached; see `PendingReleases.add`."""
        self._pending.add(pending, unanswered)
        self._loop.wake(self._clock())

    def is_releasing(self, token: str) -> bool:
        """Tell whether a lease, or a reservation, waits to be released."""
        return token in self._pending

    def end(self) -> None:
        """Renew nothing from now on, and end the thread."""
        self._loop.end()

    def renew_due(self) -> float:
        """Renew what is due, or nearly so, and attempt pending releases; return when the next is due."""
        time, planned = self._clock(), self._planned
        self._planned = math.inf  # a lease that is added from now on wakes the thread
        active = []
        for lease in list(self._leases.values()):
            if lease.due <= time + lease.spec.ttl / 12:
                if lease.is_active(time):
                    active.append(lease)
                else:
                    self.remove(lease)
                    self._handler.stopped(lease)
        for start in range(0, len(active), BATCH):
            self._renew(active[start : start + BATCH])
        # The plan is kept though its lease has ended: a stream of short tasks does not wake the thread for each of them.
        idle = planned if planned > time else math.inf
        self._planned = min((lease.due for lease in list(self._leases.values())), default=idle)
        return min(self._planned, self._pending.run_due(self._planned))

    def _renew(self, leases: Sequence[L]) -> None:
        sent_at = self._clock()
        timeout = max(0.01, min(lease.call_timeout(sent_at) for lease in leases))
        try:
            results = self._store.renew([lease.spec for lease in leases], timeout)
        except StoreError as error:
            self._handler.failed(leases, error, sent_at)
            return
        for lease, result in zip(leases, results, strict=True):
            self._handler.answered(lease, result, sent_at)
