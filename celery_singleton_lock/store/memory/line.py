"""The lines of a store in memory: as in `acquire.lua`, `_next.lua` and `_next_slot.lua` of the store on Redis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from celery_singleton_lock.store.keys import COPY_TTL
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec, Place


@dataclass
class _Waiting:
    task_id: str
    copy: float
    due: float
    message: str

    def has_lapsed(self, time: float) -> bool:
        """Tell whether it has lost its place: it keeps that while its text is here."""
        return not self.message and self.due < time


@dataclass
class Line:
    """The messages that wait for one lock, in the order of their joining."""

    clock: Callable[[], float]
    used: dict[
        str, tuple[float, str]
    ]  # of the task name: ticket -> until when other copies are dropped, and which one started
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    expires: float = 0.0
    quiet_until: float = 0.0
    quiet_latest: float = 0.0  # which `quiet_until` does not exceed
    newest: str = ""  # ticket of the message whose place others take

    def refused(self, place: Place) -> AcquireStatus | None:
        """Tell whether this copy is dropped, whatever the state of the lock."""
        until, by = self.used.get(place.ticket, (0.0, ""))
        if until <= self.clock() or by == str(place.copy):
            return None
        return AcquireStatus.SUPERSEDED if by == "superseded" else AcquireStatus.DROPPED

    def head(self, ticket: str = "", replace: str = "") -> str:
        """Return the ticket of the first in line, after one that is replaced, and those without a place, are removed.

        Arguments:
            ticket: what asks.
            replace: the task id of what takes the place of `newest`, if it does.
        """
        if replace and self.newest not in ("", ticket):
            is_own = self.waiting[self.newest].task_id == replace  # another delivery of the message: it is not skipped
            self.use(self.newest, "" if is_own else "superseded")
        for other, one in list(self.waiting.items()):
            if other == ticket or not one.has_lapsed(self.clock()):
                return other
            self.remove(other)
        return ""

    def disturb(self, place: Place, head: str) -> None:
        """Begin the quiet time anew, for a newcomer."""
        if not (head and self.quiet_latest):
            self.quiet_latest = self.clock() + place.max_quiet
        self.quiet_until = min(self.clock() + place.quiet, self.quiet_latest)
        self.expires = max(self.expires, self.clock() + place.max_quiet + COPY_TTL)

    @property
    def quiet(self) -> float:
        """For how many seconds the head is not started."""
        return max(0.0, self.quiet_until - self.clock())

    def ahead(self, ticket: str) -> int:
        """Return how many messages wait before this one; a newcomer is the last."""
        tickets = list(self.waiting)
        return tickets.index(ticket) if ticket in self.waiting else len(tickets)

    def is_turn(self, ticket: str, free: int) -> bool:
        """Tell whether a message is among the first in line, as many as slots are free; a newcomer is the last."""
        rank = 0
        for other, one in list(self.waiting.items()):
            if other == ticket or rank >= free:
                break
            if one.has_lapsed(self.clock()):
                self.remove(other)
            else:
                rank += 1
        return rank < free

    def call(self, ticket: str, free: int, ttl: float) -> tuple[str, str]:
        """Return the first in its turn, but for this ticket, who was not named, and its message; "" if there is none."""
        first = list(self.waiting.items())[: max(0, free)] if not self.quiet else []
        named = next((other for other, one in first if one.message and other != ticket), "")
        return named, self.take_message(named, ttl) if named else ""

    def give_back(self, ticket: str, message: str) -> bool:
        """Keep the text of a message that could not be published; return whether it is the first in line."""
        if ticket in self.waiting:
            self.waiting[ticket].message = self.waiting[ticket].message or message
        return next(iter(self.waiting), "") == ticket

    def next_turn(self, free: int, ttl: float) -> str:
        """Return the message of the first in line in its turn who was not named; remove those before it that are late."""
        rank, free = 0, 0 if self.quiet else free
        for ticket, one in list(self.waiting.items()):
            if rank >= free:
                break
            if one.message:
                return self.take_message(ticket, ttl)
            if one.has_lapsed(self.clock()):
                self.remove(ticket)
            else:
                rank += 1
        return ""

    def take_message(self, ticket: str, ttl: float) -> str:
        """Return a waiting message to publish, once; keep its place for a TTL."""
        one = self.waiting[ticket]
        message, one.message, one.due = one.message, "", self.clock() + ttl
        return message

    def keep_turn(self, spec: LeaseSpec, place: Place) -> None:
        """Give a message that its copy publishes a place for a TTL."""
        due = self.clock() + spec.ttl
        self.waiting[place.ticket] = _Waiting(spec.task_id, place.copy, due, "")
        self.expires = due + COPY_TTL

    def keep_place(self, place: Place) -> None:
        """Note that the copy of a message that waits has come, and comes again."""
        if one := self.waiting.get(place.ticket):
            one.copy, one.due = place.copy, self.clock() + place.due
            self.expires = max(self.expires, one.due + COPY_TTL)

    def is_outdated(self, place: Place) -> bool:
        """Tell whether a later copy of a message that waits will come."""
        one = self.waiting.get(place.ticket)
        return one is not None and place.copy < one.copy

    def join(self, spec: LeaseSpec, place: Place) -> bool:
        """Let a message wait if there is room, or go on waiting; return whether it does."""
        if not (place.ticket in self.waiting or place.replace or len(self.waiting) < place.room):
            return False
        self.used.pop(place.ticket, None)
        due = self.clock() + place.due
        self.waiting[place.ticket] = _Waiting(spec.task_id, place.next_copy, due, place.message)
        self.expires = due + COPY_TTL
        if place.gives_way or place.replace:
            self.newest = place.ticket
        return True

    def start(self, spec: LeaseSpec, place: Place) -> bool:
        """Have a message that starts leave the line; return whether others wait.

        If the head is another delivery of it, that leaves the line, too: nobody is to be skipped for it.
        """
        self.use(place.ticket, str(place.copy))
        if place.quiet:
            self.quiet_until = self.quiet_latest = 0.0
        head = next(iter(self.waiting), "")
        if self.is_of(head, spec, place):
            self.remove(head)
        if not (self.waiting or self.quiet_latest):  # as on Redis, which deletes an empty key and its TTL
            self.expires = 0.0
        return bool(self.waiting)

    def is_of(self, ticket: str, spec: LeaseSpec, place: Place) -> bool:
        """Tell whether a ticket is that of another delivery of this message."""
        return bool(ticket) and self.waiting[ticket].task_id == spec.task_id and is_same(place, identity_in(ticket))

    def remove(self, ticket: str) -> None:
        """Take a message out of the line."""
        self.waiting.pop(ticket, None)
        if ticket == self.newest:
            self.newest = ""

    def use(self, ticket: str, by: str = "") -> None:
        """Have the copies of a message dropped from now on, but for the one that started."""
        if ticket:
            self.remove(ticket)
            until, before = self.used.get(ticket, (0.0, ""))
            self.used[ticket] = (self.clock() + COPY_TTL, by or (before if until > self.clock() else ""))

    def head_to_name(self) -> str:
        """Return the ticket of the first in line, unless its copy is to start it, or it was named before."""
        head = self.head()
        return head if head and self.waiting[head].message and not self.quiet else ""


def identity_in(ticket: str) -> str:
    """Return the identity of the message that has this ticket."""
    return ticket.partition(".")[0]


def is_same(place: Place | None, identity: str) -> bool:
    """Tell of a message with the same task id whether it is this one, as `acquire.lua` does."""
    return place is None or "" in (place.identity, identity) or place.identity == identity
