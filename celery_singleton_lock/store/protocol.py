"""What a store of locks does: a few atomic verbs, all but `revoke` safe to send twice, as the owner's token goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.starts import MaxStarts

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
    max_starts: MaxStarts | None = None  # how often the signature may be started; a supervisor does not look at it
    lock: str = field(init=False)  # key of the lock
    attempt: str = field(init=False, repr=False)  # key of the note that names the token's lock
    completed: str = field(init=False)  # key of the note that tells a waiting redelivery how this delivery ended

    def __post_init__(self) -> None:
        self.lock = f"{self.base}:lock:{self.digest}"
        self.attempt = f"{self.base}:attempt:{self.token}"
        self.completed = f"{self.base}:completed:{self.digest}:{self.task_id}"

    @property
    def starts(self) -> str:
        """The key of the starts that count for `max_starts`."""
        return f"{self.base}:starts:{self.digest}"

    def ended_starts(self, success: bool | None) -> str:
        """Tell which starts count no more after a release: "" for none, "own" for this token's, or "all"."""
        if self.max_starts is None:
            return ""
        if self.max_starts.count == "crashed" or success is None:
            return "own"
        return "all" if success else ""


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
    #: The lock is free, but its signature was started too often.
    TOO_MANY_STARTS = "too_many_starts"


@dataclass(frozen=True)
class AcquireResult:
    """The answer to a request, with the lease's fence if granted, and with the holder if held."""

    status: AcquireStatus
    holder: Holder | None = None
    fence: int = 0


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
        """Acquire the lock if it is free or this token's already; return the lease's fence, or why not."""

    def renew(self, leases: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        """Extend the leases that these tokens own; return a result for each, never `LOST`."""

    def reacquire(self, wanted: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        """Acquire a missing lock again, with its old fence; return the result, never `MISSING`, and whether this call did it."""

    def release(
        self, wanted: LeaseRequest, success: bool | None, timeout: float | None = None, hold: float = 0.0
    ) -> bool:
        """Delete the lock if this token owns it; return whether a redelivery waits for the outcome (see `record_outcome`).

        The redelivery waits for a TTL; a release that is sent again lets it wait for another. With `hold`, the lock stays for
        so many seconds, without an owner. `success` is None if the body never started.
        """

    def record_outcome(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        """Store for a waiting redelivery whether this delivery succeeded, its result stored; return nothing."""

    def holder(self, lock: str) -> Holder | None:
        """Return who holds this lock, or None."""

    def revoke(self, base: str, lock: str) -> Holder | None:
        """Take the lock from its holder, who will find it lost, and return that holder, or None.

        It is sent once only: a second call could hit the next holder.
        """

    def eviction_policy(self) -> str:
        """Return the store's eviction policy; only ``noeviction`` keeps locks safe."""

    def clone(self) -> LockStore:
        """Return a store on the same data with connections of its own, and no cap on them."""

    def close(self) -> None:
        """Close idle connections; return nothing."""
