"""What a verb of a store takes: the request for a lease, its place in a line, and what becomes of a lock that is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import starts_key
from celery_singleton_lock.store.records import NO_RECORD, RunRecord


class Place(NamedTuple):
    """The place of a delivery in the line of its lock.

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
        identity: of the message, for another one may have its task id; empty if it is not known.
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
    identity: str = ""


@dataclass(slots=True)
class LeaseSpec:
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
    record: RunRecord = NO_RECORD  # what is recorded of the next call with this request, where records are kept
    #: Key of the lock, or of the slot's once that is known; "" while the store alone knows it.
    lock: str = field(init=False)
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


class AfterRelease(NamedTuple):
    """The state that a lock takes at its release, instead of free."""

    state: str  # of its holder
    ttl: float  # seconds
    token: str = ""  # of its owner; empty: nobody
