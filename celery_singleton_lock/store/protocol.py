"""What a store of locks does: a few atomic verbs, all but `revoke` safe to send twice, as the owner's token goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from celery_singleton_lock.holder import Holder

#: How long a store remembers that a delivery succeeded while a redelivery of its message waited, in seconds.
COMPLETED_TTL = 3600.0
#: How long a store remembers at least that a lock was revoked from a delivery, in seconds.
REVOKED_TTL = 3600.0


@dataclass(slots=True)
class LeaseRequest:
    """One delivery's request for a lease, and the keys that it concerns."""

    base: str  # what all keys of the task name start with, a cluster's hash tag included
    digest: str  # of the signature; empty in a supervisor, which knows the token alone
    token: str = field(repr=False)  # the delivery's secret
    ttl: float  # seconds
    task_id: str = ""
    node: str = ""
    pid: int = 0
    supervised: bool = False  # a supervisor renews and releases too, so the store notes which lock the token owns
    redelivered: bool = False  # an earlier delivery of the same message may be running, or may have run
    limit: int = 0  # how many may hold the signature at once, each in a slot with its own lock; 0: one, without slots
    lock: str = field(init=False)  # key of the lock; once a slot is granted, of that slot's
    by_token: bool = field(init=False)  # whether the lock is known to the store alone, by the note `attempt`
    attempt: str = field(init=False, repr=False)  # key of the note that names the token's lock
    completed: str = field(init=False)  # key of the note that tells a waiting redelivery how this delivery ended

    def __post_init__(self) -> None:
        self.lock = f"{self.base}:lock:{self.digest}"
        self.by_token = not self.digest or self.limit > 0
        self.attempt = f"{self.base}:attempt:{self.token}"
        self.completed = f"{self.base}:completed:{self.digest}:{self.task_id}"

    @property
    def slots(self) -> str:
        """Key of the set of slots that may be held."""
        return f"{self.base}:slots:{self.digest}"

    def slot_lock(self, slot: int) -> str:
        """Return the key of a slot's lock; slot 0 has that of a signature without slots."""
        return f"{self.base}:lock:{self.digest}:{slot}" if slot else f"{self.base}:lock:{self.digest}"

    def use_slot(self, slot: int) -> None:
        """Note which slot was granted."""
        self.lock, self.by_token = self.slot_lock(slot), False


def task_keys(base: str) -> tuple[str, str, str]:
    """Return the keys that a task name has once: of its last fence, its recent grants and its revoked tokens."""
    return f"{base}:fence", f"{base}:recent", f"{base}:revoked"


class AcquireStatus(Enum):
    """How a request for a lease ended."""

    GRANTED = "granted"
    HELD = "held"
    #: Another delivery of the same message has succeeded.
    COMPLETED = "completed"
    #: The lock was revoked from this very delivery.
    REVOKED = "revoked"


@dataclass(frozen=True)
class AcquireResult:
    """The answer to a request, with the lease's fence and slot if granted, and with the oldest holder if held."""

    status: AcquireStatus
    holder: Holder | None = None
    fence: int = 0
    slot: int = 0


class RenewResult(Enum):
    """How renewing or reacquiring a lease ended."""

    RENEWED = "renewed"
    MISSING = "missing"
    #: Another token owns the lock.
    NOT_OWNER = "not_owner"
    #: The lock was revoked from this very delivery.
    REVOKED = "revoked"
    #: Reacquired, but another delivery held the lock in between.
    LOST = "lost"


class LockStore(Protocol):
    """The verbs of a store.

    Each raises `StoreUnavailable` within its timeout (seconds, at most the store's own), or `StoreError` if the store refuses.
    """

    def acquire(self, wanted: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        """Acquire the lock if it is free or this token's already; return the lease's fence, or why not.

        With a limit: acquire a free slot if fewer than so many are held, whatever limits their holders had.
        """

    def renew(self, leases: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        """Extend the leases that these tokens own; return a result for each, never `LOST`."""

    def reacquire(self, wanted: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        """Acquire a missing lock again, with its old fence; return the result, never `MISSING`, and whether this call did it."""

    def release(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        """Delete the lock if this token owns it; return whether a redelivery waits for the outcome (see `record_outcome`).

        The redelivery waits for a TTL; a release that is sent again lets it wait for another.
        """

    def record_outcome(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        """Store for a waiting redelivery whether this delivery succeeded, its result stored; return nothing."""

    def holder(self, lock: str, slots: str = "") -> Holder | None:
        """Return who holds this lock, or None.

        With the key of a set of slots: the oldest holder of these and of `lock`, which is slot 0.
        """

    def revoke(self, base: str, lock: str, slots: str = "") -> Holder | None:
        """Take the lock that `holder` would look at from its holder, who will find it lost, and return that holder, or None.

        It is sent once only: a second call could hit the next holder.
        """

    def eviction_policy(self) -> str:
        """Return the store's eviction policy; only ``noeviction`` keeps locks safe."""

    def clone(self) -> LockStore:
        """Return a store on the same data with connections of its own, and no cap on them."""

    def close(self) -> None:
        """Close idle connections; return nothing."""
