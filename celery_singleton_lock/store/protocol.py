"""What a store of locks does: a few atomic verbs, all but `revoke` safe to send twice, as the owner's token goes with them.

Here are the protocol `LockStore` and what its verbs answer; what they take is in `requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.records import RecordStore
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec


class AcquireStatus(Enum):
    """How a request for a lease ended."""

    GRANTED = "granted"
    #: Somebody holds the lock, or its line is not over.
    REFUSED = "held"
    #: Another delivery of the same message has succeeded.
    COMPLETED = "completed"
    #: The lock was revoked from this very delivery.
    REVOKED = "revoked"
    #: Another copy of this message has started, or comes later.
    DROPPED = "dropped"
    #: Another message has taken this one's place in the line.
    SUPERSEDED = "superseded"
    #: Another message has taken this one's place, after a delivery of it had started its body.
    REPLACED = "replaced"
    #: The lock is free, but tasks with its key were started too often.
    TOO_MANY_STARTS = "too_many_starts"


class AcquireResult(NamedTuple):
    """The answer to a request: fence and slot if granted, the (oldest) holder and the line if refused, the head if superseded."""

    status: AcquireStatus
    holder: Holder | None = None
    fence: int = 0
    slot: int = 0
    waiting: int = 0  # how many messages wait in line
    head: str = ""  # task id of the first of them
    is_waiting: bool = False  # whether this message is one of them
    quiet: float = 0.0  # seconds for which the head is not started, as newcomers have come
    asked: float = 0.0  # seconds since the holder was asked to stop; 0 if it was not
    ahead: int = 0  # how many of those that wait are before this message
    message: str = ""  # to be published: of another one, whose turn it is for a TTL, as the lock is free
    shares_id: bool = False  # whether the holder is another message with the same task id
    is_head: bool = False  # whether another delivery of this message is the first of those that wait


class GracePeriod(StoreUnavailable):
    """The store may have lost data, so it grants no new lease for a while, in which living holders reacquire theirs.

    Arguments:
        left: seconds that it lasts.
    """

    def __init__(self, left: float = 0.0) -> None:
        self.left = left
        super().__init__(left)

    def __str__(self) -> str:
        return f"the store may have lost locks, and grants no new one for {self.left:.1f} s"


class Released(NamedTuple):
    """Who waited for a lock that was released."""

    redelivery_waits: bool = False  # for the outcome: see `LockStore.record_outcome`
    message: str = ""  # to be published: of the next in line, whose turn it is for a TTL


class RenewResult(Enum):
    """How renewing or reacquiring a lease ended."""

    RENEWED = "renewed"
    #: Renewed, and a message that waits asks the holder to stop.
    STOP = "stop"
    MISSING = "missing"
    #: Another token owns the lock.
    NOT_OWNER = "not_owner"
    #: The lock was revoked from this very delivery.
    REVOKED = "revoked"
    #: Reacquired, but another delivery held the lock in between.
    LOST = "lost"


class LockStore(Protocol):
    """The verbs of a store.

    Each raises `StoreUnavailable` within its timeout (seconds, at most the store's own), or `StoreError` if the store refuses. A
    login or permission that is refused now, but was accepted in this process before, counts as unavailable, too.
    """

    def acquire(self, spec: LeaseSpec, timeout: float | None = None) -> AcquireResult:
        """Acquire the lock if it is free, this token's already, or reserved for this task id; return its fence, or why not.

        With a limit: acquire a free slot if fewer than so many are held, whatever limits their holders had.

        Raises:
            GracePeriod: the store may have lost the lock, and leaves it to a living holder for a TTL.
        """

    def renew(self, leases: Sequence[LeaseSpec], timeout: float | None = None) -> list[RenewResult]:
        """Extend the leases that these tokens own; return a result for each, never `LOST`.

        A lock that is known by its token alone is noted in its request.
        """

    def reacquire(self, spec: LeaseSpec, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        """Acquire a missing lock again, with its old fence; return the result, never `MISSING`, and whether this call did it."""

    def release(
        self, spec: LeaseSpec, success: bool | None, timeout: float | None = None, kept: AfterRelease | None = None
    ) -> Released:
        """Delete the lock if this token owns it, or reserve it for the next in line; return who waits.

        A redelivery waits for a TTL; a release that is sent again lets it wait for another. `kept` says what the lock becomes
        instead of free. `success` is None if the body never started. With a limit no slot is reserved, and the next in line is
        the first message whose turn it is and that was not returned before.
        """

    def record_outcome(self, spec: LeaseSpec, success: bool, timeout: float | None = None) -> None:
        """Store for a waiting redelivery whether this delivery succeeded, its result stored; return nothing."""

    def keep_continued(self, spec: LeaseSpec) -> bool:
        """Tell whether another task goes on with the id of this one, as its release has noted; remember it for longer, if so."""

    def has_begun(self, spec: LeaseSpec) -> bool:
        """Tell whether the body of this message began in an earlier delivery (`comes_again`) that has not ended it."""

    def leave(self, spec: LeaseSpec, ticket: str, timeout: float | None = None) -> str:
        """Take a message out of the line, and have its copies dropped; return the next one, as `release`, if it was its turn."""

    def give_back(self, spec: LeaseSpec, ticket: str, message: str) -> None:
        """Give back the turn of a message that could not be published: the line keeps this text of it, and the lock is free."""

    def holder(self, lock: str, slots: str = "") -> Holder | None:
        """Return who holds this lock, or None.

        With the key of a set of slots: the oldest holder of these and of `lock`, which is slot 0.
        """

    def revoke(self, base: str, lock: str, slots: str = "", starts: str = "", fence: int = 0) -> Holder | None:
        """Take the lock that `holder` would look at from its holder, who will find it lost, and return that holder, or None.

        With a fence: from that lease alone. Without one, it is sent once only: a second call could hit the next holder.
        Forget the counted starts, if their key is given.
        """

    def records(self) -> RecordStore:
        """Return what reads the records.

        Raises:
            ConfigurationError: this store keeps none.
        """

    def check(self, base: str) -> None:
        """Write a key of this task name that expires, to see whether the store takes locks of it; return nothing."""

    def eviction_policy(self) -> str:
        """Return the store's eviction policy; only ``noeviction`` keeps locks safe."""

    def unsafe_replicas(self) -> int:
        """Return how many replicas the primary has if it grants locks without them (no `min-replicas-to-write`), else 0."""

    def clone(self) -> LockStore:
        """Return a store on the same data with connections of its own, and no cap on them."""

    def close(self) -> None:
        """Close idle connections; return nothing."""
