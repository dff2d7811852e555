"""What a store of locks does: a few atomic verbs, all but `revoke` safe to send twice, as the owner's token goes with them.

Here are the protocol `LockStore`, what its verbs take (`LeaseRequest`, `Place`) and answer, and the names of the keys it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.starts import MaxStarts
from celery_singleton_lock.store.records import NOTHING, Noted, RecordStore

#: How long a store remembers that a delivery succeeded while a redelivery of its message waited, in seconds.
COMPLETED_TTL = 3600.0
#: How long a store remembers that another task goes on with the id of one whose body has ended, in seconds.
CONTINUED_TTL = 3600.0
#: How long late copies of a message that waited in line are dropped, in seconds.
COPY_TTL = 3600.0
#: How long a store remembers at least that a lock was revoked from a delivery, in seconds.
REVOKED_TTL = 3600.0
#: How long a store remembers that a body began which has not ended, in seconds. Its message is delivered again before that.
BEGUN_TTL = 7 * 86400.0
#: How long a store keeps what a check has written, in seconds.
CHECK_TTL = 5.0


class Place(NamedTuple):
    """What a delivery says of its place in the line of its lock.

    Arguments:
        ticket: of its message; empty if the message has not waited.
        copy: number of this copy of the message, which grows from copy to copy.
        room: how many may wait, this message included, if it is to join; 0 if it is not.
        replace: whether it takes the place of the message that waits and gives way, if there is one.
        next_copy: number of the copy that was published with a delay.
        due: seconds until when that copy comes at the latest; after that the place of a message without a text is lost.
        message: what starts the message at once, its text; empty if only the copy can.
        quiet: seconds without a newcomer after which the head of the line may start; 0: at once.
        max_quiet: seconds after the first newcomer after which it may start in any case.
        stop: whether it is to replace the holder: when it joins, a running holder is asked to stop, and a reservation ends. A
            message that was replaced itself is not granted the lock.
        gives_way: whether a later message with `replace` takes its place.
    """

    ticket: str = ""
    copy: float = 0.0
    room: int = 0
    replace: bool = False
    next_copy: float = 0.0
    due: float = 0.0
    message: str = ""
    quiet: float = 0.0
    max_quiet: float = 0.0
    stop: bool = False
    gives_way: bool = False


@dataclass(slots=True)
class LeaseRequest:
    """One delivery's request for a lease, and the keys that it concerns."""

    base: str  # what all keys of the task name start with, a cluster's hash tag included
    digest: str  # of the arguments; empty in a supervisor, which knows the token alone
    token: str = field(repr=False)  # the delivery's secret
    ttl: float  # seconds
    task_id: str = ""
    node: str = ""
    pid: int = 0
    supervised: bool = False  # a supervisor renews and releases too, so the store notes which lock the token owns
    redelivered: bool = False  # an earlier delivery of the same message may be running, or may have run
    queued: bool = False  # a reservation: no worker has started the message
    place: Place | None = None  # where the line counts: the lock is only free for its head
    limit: int = 0  # how many may hold the lock at once, each in a slot with its own lock; 0: one, without slots
    stoppable: bool = False  # its renewals tell whether the holder is asked to stop
    max_starts: MaxStarts | None = None  # how often its lock key may be started; a supervisor does not look at it
    comes_again: bool = False  # its message is delivered again if its body does not end; the store notes that it began
    is_unfinished: bool = False  # its body has begun and was cut off; a release remembers that it did not end
    is_continued: bool = False  # its body has ended, and another task goes on with its id (`Task.replace`)
    grace: float = 0.0  # seconds of a grace period; 0: the TTL, which is longer for a reservation
    noted: Noted = NOTHING  # what is recorded of the next call with this request, where records are kept
    lock: str = field(
        init=False
    )  # key of the lock; "" while the store alone knows it; once a slot is known, of that slot's
    by_token: bool = field(init=False)  # whether the lock is known to the store alone, by the note `attempt`
    attempt: str = field(init=False, repr=False)  # key of the note that names the token's lock; a reservation has none
    completed: str = field(init=False)  # key of the note that tells a waiting redelivery how this delivery ended

    def __post_init__(self) -> None:
        self.lock = f"{self.base}:lock:{self.digest}" if self.digest else ""
        self.by_token = not self.digest or self.limit > 0
        self.attempt = f"{self.base}:attempt:{self.token}"
        self.completed = f"{self.base}:completed:{self.digest}:{self.task_id}"

    @property
    def continued(self) -> str:
        """Key of the note that another task goes on with this one's id."""
        return f"{self.base}:continued:{self.digest}:{self.task_id}"

    @property
    def slots(self) -> str:
        """Key of the set of slots that may be held."""
        return f"{self.base}:slots:{self.digest}"

    def slot_lock(self, slot: int) -> str:
        """Return the key of a slot's lock; slot 0 has that of a lock without slots."""
        return f"{self.base}:lock:{self.digest}:{slot}" if slot else f"{self.base}:lock:{self.digest}"

    def use_slot(self, slot: int) -> None:
        """Note which slot was granted."""
        self.lock, self.by_token = self.slot_lock(slot), False

    @property
    def starts(self) -> str:
        """The key of the starts that count for `max_starts`."""
        return starts_key(self.base, self.digest)

    def ended_starts(self, success: bool | None) -> str:
        """Tell which starts count no more after a release: "" for none, "own" for this token's, or "all"."""
        if self.max_starts is None:
            return ""
        if self.max_starts.count == "crashed" or success is None:
            return "own"
        return "all" if success else ""


def starts_key(base: str, digest: str) -> str:
    """Return the key of a lock key's starts that count for `max_starts`."""
    return f"{base}:starts:{digest}"


def task_keys(base: str) -> tuple[str, str, str]:
    """Return the keys that a task name has once: of its last fence, its recent grants and its revoked tokens."""
    return f"{base}:fence", f"{base}:recent", f"{base}:revoked"


def record_keys(base: str) -> tuple[str, str, str]:
    """Return the keys of a task name's records: the leases that exist, the counters, and the last runs."""
    return f"{base}:registry", f"{base}:stats", f"{base}:history"


def check_key(base: str) -> str:
    """Return the key that a check of the store writes."""
    return f"{base}:check"


def pauses_key(base: str) -> str:
    """Return the key of operators' pauses."""
    return f"{base}:pauses"


def primary_key(base: str) -> str:
    """Return the key of the note which server has a task name's locks, and since when."""
    return f"{base}:primary"


def line_keys(base: str, digest: str) -> tuple[str, str, str]:
    """Return the keys of a lock's line: the tickets in order, their messages, and the task name's used tickets."""
    return f"{base}:line:{digest}", f"{base}:waiting:{digest}", f"{base}:used"


def begun_key(base: str) -> str:
    """Return the key of the messages of a task name whose bodies began, and have not ended."""
    return f"{base}:begun"


def replaced_key(base: str) -> str:
    """Return the key of the messages of a task name that were replaced by others."""
    return f"{base}:replaced"


#: Token of a lock that is reserved for the head of its line.
LINE_TOKEN = "queued:line"


def queued_token(task_id: str) -> str:
    """Return the token of a message's reservation, which any delivery of the message may turn into its lease: it is no secret."""
    return f"queued:{task_id}"


class Kept(NamedTuple):
    """What a lock becomes at its release, instead of free."""

    state: str  # of its holder
    ttl: float  # seconds
    token: str = ""  # of its owner; empty: nobody


class AcquireStatus(Enum):
    """How a request for a lease ended."""

    GRANTED = "granted"
    HELD = "held"
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


@dataclass(frozen=True)
class AcquireResult:
    """The answer to a request: fence and slot if granted, the (oldest) holder and the line if held, the head if superseded."""

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

    def acquire(self, wanted: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        """Acquire the lock if it is free, this token's already, or reserved for this task id; return its fence, or why not.

        With a limit: acquire a free slot if fewer than so many are held, whatever limits their holders had.

        Raises:
            GracePeriod: the store may have lost the lock, and leaves it to a living holder for a TTL.
        """

    def renew(self, leases: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        """Extend the leases that these tokens own; return a result for each, never `LOST`.

        A lock that is known by its token alone is noted in its request.
        """

    def reacquire(self, wanted: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        """Acquire a missing lock again, with its old fence; return the result, never `MISSING`, and whether this call did it."""

    def release(
        self, wanted: LeaseRequest, success: bool | None, timeout: float | None = None, kept: Kept | None = None
    ) -> Released:
        """Delete the lock if this token owns it, or reserve it for the next in line; return who waits.

        A redelivery waits for a TTL; a release that is sent again lets it wait for another. `kept` says what the lock becomes
        instead of free. `success` is None if the body never started. With a limit no slot is reserved, and the next in line is
        the first message whose turn it is and that was not returned before.
        """

    def record_outcome(self, wanted: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        """Store for a waiting redelivery whether this delivery succeeded, its result stored; return nothing."""

    def keep_continued(self, wanted: LeaseRequest) -> bool:
        """Tell whether another task goes on with the id of this one, as its release has noted; remember it for longer, if so."""

    def has_begun(self, wanted: LeaseRequest) -> bool:
        """Tell whether the body of this message began in an earlier delivery (`comes_again`) that has not ended it."""

    def leave(self, wanted: LeaseRequest, ticket: str, timeout: float | None = None) -> str:
        """Take a message out of the line, and have its copies dropped; return the next one, as `release`, if it was its turn."""

    def give_back(self, wanted: LeaseRequest, ticket: str, message: str) -> None:
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
