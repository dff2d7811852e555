"""Pending releases: leases that could not be released yet, or whose redelivery waits to learn how the task ended."""

from __future__ import annotations

import math
from collections.abc import Callable

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec

MAX_UNANSWERED = 1000  # unanswered acquires that are remembered in an outage; others are left to expire
LONGEST_INTERVAL = 2.5  # seconds between two attempts


class PendingRelease:
    """A release that is repeated until the store has confirmed it. If a redelivery waits, it also records the task's outcome."""

    def __init__(
        self,
        spec: LeaseSpec,
        success: bool | None,
        outcome: bool | None = None,
        kept: AfterRelease | None = None,
        cooldown_until: float = 0.0,
        publish: Callable[[str], object] = lambda message: None,
    ) -> None:
        self.spec = spec
        self.success = success  # whether the body returned; None: it never started
        self.kept = kept  # what the lock becomes instead of free
        self.cooldown_until = cooldown_until  # the lock cools down until this time of `now`
        self.publish = publish  # publishes the message of the next in line, or has another thread do that
        self.outcome = outcome  # whether the task succeeded and its result is stored; None while that is not known
        self.due = 0.0
        self.interval = min(spec.ttl / 12, LONGEST_INTERVAL)
        self.confirmed = 0  # how often the store has confirmed it
        self.redelivery_waits = False
        self.next_message = ""  # of the next in line, as the store has named it

    def send(self, store: LockStore, timeout: float | None = None) -> None:
        """Release the lock, publish the next in line, and keep a redelivery waiting; tell it the outcome once that is known.

        Raises:
            StoreError: the store did not confirm it.
        """
        outcome = self.outcome
        cooldown = self.cooldown_until - now() if self.cooldown_until else 0.0
        kept = AfterRelease("cooldown", cooldown) if cooldown > 0 else self.kept
        self.redelivery_waits, message = store.release(self.spec, self.success, timeout, kept)
        self.spec.record = self.spec.record._replace(fence=0)  # the end is recorded, and must not be again
        if message:
            self.next_message = message
            self.publish(message)
        if self.redelivery_waits and outcome is None:
            return
        if self.redelivery_waits:
            store.record_outcome(self.spec, bool(outcome), timeout)
        self.confirmed += 1


class PendingReleases:
    """The pending releases of one process, attempted by its renewal thread.

    Each is confirmed twice: a store that was stopped may execute an unanswered acquire, of another connection, after the first.
    """

    def __init__(
        self,
        store: LockStore,
        on_refused: Callable[[StoreError, LeaseSpec], object],
        clock: Callable[[], float],
        on_unavailable: Callable[[StoreError], object],
    ) -> None:
        self._store = store
        self._on_refused = on_refused
        self._on_unavailable = on_unavailable  # called at each attempt that the store does not answer
        self._clock = clock
        self._pending: dict[str, PendingRelease] = {}

    def add(self, pending: PendingRelease, unanswered: bool = False) -> None:
        """Attempt this release from now on; `unanswered`: of an acquire, so that its lease never had a body."""
        if not unanswered or len(self._pending) < MAX_UNANSWERED:
            pending.due = self._clock()
            self._pending[pending.spec.token] = pending

    def __contains__(self, token: str) -> bool:
        return token in self._pending

    def run_due(self, until: float) -> float:
        """Attempt what is due, up to a time when renewals are; return when the next attempt is due."""
        for pending in list(self._pending.values()):
            time = self._clock()
            if time >= until:
                break
            if pending.due > time:
                continue
            pending.due = time + pending.interval
            try:
                pending.send(self._store, max(0.01, min(pending.spec.ttl / 6, until - time)))
            except StoreUnavailable as error:  # for the others, too
                self._on_unavailable(error)
                return pending.due
            except StoreError as error:  # it refuses, and will refuse again
                pending.confirmed = 2
                self._on_refused(error, pending.spec)
            except Exception:  # of a credential provider, say, which all of them would meet
                for other in list(self._pending.values()):
                    other.due = max(other.due, pending.due)
                raise
            if pending.confirmed >= 2:
                self._pending.pop(pending.spec.token, None)
        return min((pending.due for pending in list(self._pending.values())), default=math.inf)
