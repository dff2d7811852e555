"""A model of workers, a broker and a store, whose steps are taken in any order.

The store is the library's own store in memory, and the policies are the library's own. A delivery does what
`worker/execution.py`, `worker/outcome.py` and `worker/line.py` do, one store call or one publication per step. Time advances in
steps too, and holders that live renew then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from celery_singleton_lock import Wait
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.policies.decisions import Duplicate, Enqueue, Policy
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.protocol import (
    LINE_TOKEN,
    AcquireResult,
    AcquireStatus,
    LeaseRequest,
    Place,
    RenewResult,
    queued_token,
)

TTL = 10.0
STEP = 5.0  # seconds by which time advances
COPY_DELAY = TTL
QUEUE_TTL = 25.0  # of a reservation
BASE, DIGEST = "model:{task}", "digest"

Step = tuple[str, int]


@dataclass(frozen=True, order=True)
class Message:
    """A message at the broker."""

    id: str
    ready: float = 0.0  # when it may be delivered
    ticket: str = ""
    copy: float = 0.0
    is_copy: bool = False  # a delayed copy, which stands for the message
    redelivered: bool = False


@dataclass(frozen=True)
class Delivery:
    """A message in a worker, and what it does next."""

    number: int
    message: Message
    next: str
    place: Place
    wish: Enqueue | None = None  # to join the line
    joins: bool = False  # by this acquire
    slot: int = 0  # that it was granted

    @property
    def token(self) -> str:
        return f"token {self.number}"


@dataclass
class World:
    """All there is, and the faults that may still happen.

    Arguments:
        messages: how many there are.
        late: whether they are acknowledged late, so that a broker delivers those of dead workers again.
        twice: of how many messages the broker delivers the first message twice, as after a visibility timeout.
        deaths: how many workers may die.
        dead_children: how many children may die whose worker lives, and releases for them.
        losses: how often the store may lose its data.
        reserved: whether the first message has the lock from its publish on.
        purged: how many messages the broker may lose.
        steps: by how many steps time may advance.
        limit: how many may run at once; 0: one, without slots.
        policy: of duplicates: one that uses the line.
    """

    messages: int = 3
    late: bool = False
    twice: int = 0
    deaths: int = 0
    dead_children: int = 0
    losses: int = 0
    reserved: bool = False
    purged: int = 0
    steps: int = 8
    limit: int = 0
    policy: Policy = Wait(max_waiting=100)  # noqa: RUF009 - it is frozen
    time: float = 0.0
    count: int = 0
    broker: tuple[Message, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    started: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()  # messages, and how many had started before
    latest: str = ""  # the message that took the place of others last
    overtaking: tuple[str, ...] = ()  # newcomers that started in the turn of messages that waited
    gone: frozenset[str] = frozenset()  # messages that died with their worker, acknowledged before, or that were purged
    has_lost_data: bool = False
    store: Any = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(clock=lambda: self.time)
        self.broker = tuple(Message(f"m{number}") for number in range(self.messages))
        if self.reserved:
            token = queued_token("m0")
            self.store.acquire(LeaseRequest(BASE, DIGEST, token, QUEUE_TTL, "m0", queued=True, limit=self.limit))

    def copy(self) -> World:
        """Return an independent world in the same state."""
        other = copy.copy(self)
        other.store = MemoryStore(clock=lambda: other.time)
        other.store._records = {key: copy.copy(record) for key, record in self.store._records.items()}
        other.store._used = {key: dict(used) for key, used in self.store._used.items()}
        for key, line in self.store._lines.items():
            waiting = {ticket: copy.copy(one) for ticket, one in line.waiting.items()}
            used = other.store._used[BASE]
            other.store._lines[key] = replace(line, clock=other.store._clock, used=used, waiting=waiting)
        return other

    def key(self) -> object:
        """Return what tells this state from others."""
        records = tuple(
            (
                key,
                record.token,
                record.task_id,
                record.expires,
                record.state,
                record.named,
                record.redelivered,
                record.stop,
            )
            for key, record in sorted(self.store._records.items())
            if record.expires > self.time and ":fence" not in key and ":recent" not in key
        )
        lines = tuple(
            (ticket, one.task_id, one.copy, one.due, one.message)
            for line in self.store._lines.values()
            for ticket, one in line.waiting.items()
        )
        used = tuple(sorted((ticket, by) for used in self.store._used.values() for ticket, (_, by) in used.items()))
        rest = (self.twice, self.deaths, self.dead_children, self.losses, self.purged, self.time)
        return records, lines, used, self.broker, self.deliveries, self.started, rest

    # -- steps -----------------------------------------------------------------------------------

    def choices(self) -> Iterator[Step]:
        """Yield what may happen next."""
        for place, message in enumerate(self.broker):
            if message.ready <= self.time:
                yield "deliver", place
                if self.purged:
                    yield "purge", place
                if self.twice and not message.ticket and not message.redelivered:
                    yield "deliver twice", place
        for place, delivery in enumerate(self.deliveries):
            yield delivery.next, place
            if self.deaths:
                yield "die", place
            if self.dead_children and delivery.next == "end":
                yield "child dies", place
        if self.losses:
            yield "lose data", 0
        if self.time < self.steps * STEP:
            yield "time", 0

    def do(self, step: Step) -> None:
        """Take a step."""
        name, place = step
        getattr(self, "_" + name.replace(" ", "_"))(place)

    def is_over(self) -> bool:
        """Tell whether nothing is left to be done."""
        return not self.broker and not self.deliveries

    def running(self) -> list[str]:
        """Return the tokens of the bodies that run."""
        return [one.token for one in self.deliveries if one.next == "end"]

    def waiting(self) -> list[str]:
        """Return the tickets of the messages that wait in line."""
        return [ticket for line in self.store._lines.values() for ticket in line.waiting]

    def holders(self) -> list[int]:
        """Return the slots that are held."""
        return list(self.store._held_slots(f"{BASE}:lock:{DIGEST}"))

    def _publish(self, message: Message) -> None:
        self.broker = tuple(sorted((*self.broker, message)))

    def _take(self, place: int) -> Message:
        message = self.broker[place]
        self.broker = self.broker[:place] + self.broker[place + 1 :]
        return message

    def _set(self, delivery: Delivery, **changes: Any) -> None:
        changed = replace(delivery, **changes)
        self.deliveries = tuple(changed if one.number == delivery.number else one for one in self.deliveries)

    def _finish(self, delivery: Delivery) -> None:
        self.deliveries = tuple(one for one in self.deliveries if one.number != delivery.number)

    def _deliver(self, place: int) -> None:
        message = self._take(place)
        self.count += 1
        place_in_line = Place(message.ticket, message.copy, stop=self.policy.stops_holder)
        start = Delivery(self.count, message, "acquire", place_in_line)
        self.deliveries = (*self.deliveries, start)

    def _deliver_twice(self, place: int) -> None:
        message = self.broker[place]
        self.twice -= 1
        self._deliver(place)
        self._publish(replace(message, redelivered=True))

    def _purge(self, place: int) -> None:
        self.purged -= 1
        self.gone |= {self._take(place).id}

    def _request(self, delivery: Delivery, place: Place | None) -> LeaseRequest:
        message = delivery.message
        token = LINE_TOKEN if message.is_copy else delivery.token
        wanted = LeaseRequest(
            BASE,
            DIGEST,
            token,
            TTL,
            message.id,
            redelivered=message.redelivered,
            queued=message.is_copy,
            limit=self.limit,
        )
        wanted.place = place
        if self.limit and delivery.next == "end":
            wanted.use_slot(delivery.slot)
        return wanted

    def _acquire(self, place: int) -> None:
        delivery = self.deliveries[place]
        result = self.store.acquire(self._request(delivery, delivery.place))
        if delivery.message.is_copy:
            self._copy_acquired(delivery, result)
        else:
            self._message_acquired(delivery, result)

    def _message_acquired(self, delivery: Delivery, result: AcquireResult) -> None:
        message = delivery.message
        if delivery.place.replace and (result.is_waiting or result.status is AcquireStatus.GRANTED):
            self.latest = message.id
        if result.status is AcquireStatus.GRANTED:
            self.started = (*self.started, message.id)
            if not message.ticket and len(self.waiting()) + len(self.holders()) > max(1, self.limit):
                self.overtaking = (*self.overtaking, message.id)
            self._set(delivery, next="end", slot=result.slot)
        elif result.status is not AcquireStatus.HELD:
            if result.status in (AcquireStatus.SUPERSEDED, AcquireStatus.REPLACED):
                self._note_skip(message)
            self._finish(delivery)
        elif delivery.joins and result.is_waiting:
            self.joined = (*self.joined, message.id)
            self._finish(delivery)
        elif result.head == message.id and message.redelivered:
            self._finish(delivery)
        elif result.holder is not None and result.holder.task_id == message.id:
            self._publish(replace(message, redelivered=True, ready=self.time + STEP))
            self._finish(delivery)
        elif wish := self._wish(delivery, result):
            self._set(delivery, next="publish copy", wish=wish)
        else:
            self._note_skip(message)
            self._set(delivery, next="leave")

    def _wish(self, delivery: Delivery, result: AcquireResult) -> Enqueue | None:
        """Return how a duplicate is to wait, or None if it is not."""
        decision = self.policy.decide(
            Duplicate(
                result.holder or Holder(),
                waiting=result.waiting,
                head=result.head,
                is_waiting=result.is_waiting,
                has_waited=delivery.message.ticket != "",
                asked=result.asked,
            )
        )
        return decision if isinstance(decision, Enqueue) else None

    def _note_skip(self, message: Message) -> None:
        self.skipped = (*self.skipped, (message.id, len(self.started)))

    def _leave(self, place: int) -> None:
        delivery = self.deliveries[place]
        if delivery.place.ticket:
            self.store.leave(self._request(delivery, None), delivery.place.ticket)
        self._finish(delivery)

    def _copy_acquired(self, delivery: Delivery, result: AcquireResult) -> None:
        holder, message = result.holder, delivery.message
        is_running = holder is not None and holder.task_id == message.id and holder.state == "running"
        if delivery.joins:
            ends = result.is_waiting or is_running or result.status is AcquireStatus.DROPPED
        elif result.status is AcquireStatus.HELD and not is_running and (wish := self._wish(delivery, result)):
            self._set(delivery, next="publish copy", wish=wish)
            return
        else:
            ends = is_running or result.status is AcquireStatus.DROPPED
        if ends:
            self._finish(delivery)
        else:
            self._set(delivery, next="publish message")

    def _publish_copy(self, place: int) -> None:
        delivery = self.deliveries[place]
        message, wish = delivery.message, delivery.wish
        assert wish is not None
        ticket, following = message.ticket or f"t{delivery.number}", message.copy + 1 + delivery.number / 100
        ticket = delivery.place.ticket or ticket  # it had no room before
        ready = self.time + COPY_DELAY
        self._publish(Message(message.id, ready, ticket, following, is_copy=True))
        text = f"{message.id} {ticket} {message.copy + 0.5}"
        due = COPY_DELAY + TTL
        joining = Place(ticket, message.copy, wish.room, wish.replace, following, due, text, stop=wish.stop)
        self._set(delivery, next="acquire", place=joining, joins=True)

    def _publish_message(self, place: int) -> None:
        delivery = self.deliveries[place]
        message = delivery.message
        self._publish(Message(message.id, self.time, message.ticket, message.copy + 0.5))
        self._finish(delivery)

    def _end(self, place: int) -> None:
        delivery = self.deliveries[place]
        redelivery_waits, text = self.store.release(self._request(delivery, None), True)
        if redelivery_waits:
            self.store.record_outcome(self._request(delivery, None), True)
        if text:
            self._set(delivery, next="publish next", message=replace(delivery.message, ticket=text))
        else:
            self._finish(delivery)

    def _publish_next(self, place: int) -> None:
        delivery = self.deliveries[place]
        name, ticket, number = delivery.message.ticket.split()
        self._publish(Message(name, self.time, ticket, float(number)))
        self._finish(delivery)

    # -- faults and time ---------------------------------------------------------------------------

    def _die(self, place: int) -> None:
        self.deaths -= 1
        self._ended_by_death(self.deliveries[place])

    def _child_dies(self, place: int) -> None:
        delivery = self.deliveries[place]
        self.dead_children -= 1
        self.store.release(self._request(delivery, None), False)
        self._ended_by_death(delivery)

    def _ended_by_death(self, delivery: Delivery) -> None:
        message = delivery.message
        self._finish(delivery)
        if delivery.next == "publish next":
            return
        if self.late:
            self._publish(replace(message, redelivered=True))
        else:
            self.gone |= {message.id}

    def _lose_data(self, _: int) -> None:
        self.losses -= 1
        self.has_lost_data = True
        for data in (self.store._records, self.store._lines, self.store._used):
            data.clear()

    def _time(self, _: int) -> None:
        self.time += STEP
        for delivery in self.deliveries:
            if delivery.next == "end":
                wanted = self._request(delivery, None)
                if self.store.renew([wanted]) == [RenewResult.MISSING]:
                    self.store.reacquire(wanted, 1)
