"""A model of workers, a broker and a store, whose steps are taken in any order.

The store is the library's own store in memory, or both stores side by side (`both.py`), and the policies are the library's own. A
delivery does what `worker/execution.py`, `worker/duplicates.py` and `line/` do, one store call or one publication per step. A
publication may raise, whether or not the message arrives. Time advances in steps too, and holders that live renew then.

The model contains no outage of the store, no operator's pause, no quiet time, no `Join`, no message that expires or is too long
for the line, and no time as long as `COPY_TTL`. A broker delivers first messages twice, not copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_singleton_lock import Wait
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.policies.decisions import Duplicate, Enqueue, Policy, RunLater
from celery_singleton_lock.store.keys import COPY_TTL, LINE_TOKEN, queued_token
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.memory.line import Line
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, RenewResult
from celery_singleton_lock.store.requests import LeaseSpec, Place

TTL = 10.0
STEP = 5.125  # seconds by which time advances: nothing expires in the moment of a call, where stores may differ
COPY_DELAY = TTL
QUEUE_TTL = 25.0  # of a reservation
BASE, DIGEST = "model:{task}", "digest"
LOCK = f"{BASE}:lock:{DIGEST}"

#: Steps that publish a message, and may fail.
PUBLICATIONS = tuple(f"publish {what}" for what in ("named", "copy", "later", "message", "next", "again"))
#: The rest of a step, which follows it at once: see `World._eager`.
EAGER = ("acquire", *PUBLICATIONS, "acknowledge")

Step = tuple[str, int]


class Message(NamedTuple):
    """A message at the broker. Two of them may have one task id: it is the part of the name before a quote."""

    id: str
    ready: float = 0.0  # when it may be delivered
    ticket: str = ""
    copy: float = 0.0
    is_copy: bool = False  # a delayed copy, which stands for the message
    redelivered: bool = False
    unfinished: bool = False  # says that an earlier delivery of it began its body, and did not end it
    stays: bool = False  # a copy that was due, and stays in its worker

    @property
    def task_id(self) -> str:
        return self.id.rstrip("'")

    @property
    def text(self) -> str:
        """The message as the line keeps it."""
        return f"{self.id} {self.ticket} {self.copy} {self.unfinished:d}"


class Delivery(NamedTuple):
    """A message in a worker, and what it does next."""

    number: int
    message: Message
    next: str
    place: Place
    wish: Enqueue | RunLater | None = None  # of the policy, unless the message ends
    following: Message | None = None  # to be published
    slot: int = 0  # that it was granted
    before: str = ""  # what it was to do next
    answer: AcquireResult | None = None  # of the store, which has named another message
    old: bool = False  # its body ran when the store lost its data
    unfinished: bool = False  # its body began in an earlier delivery, and did not end
    is_retry: bool = False  # no delivery: what tries in a process to publish a message again

    @property
    def token(self) -> str:
        return f"token {self.number}"


class Clock:
    """The time of a world and of its store."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


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
        delays: how often time may advance while bodies run, or messages could be delivered. It always advances when nothing else
            can happen.
        stops: how often time may advance while a worker is between two steps.
        failures: how many publications may raise; what they published may have arrived all the same.
        limit: how many may run at once; 0: one, without slots.
        policy: of duplicates.
        once: whether no message starts twice.
        ordered: whether messages that wait start before newcomers, in the order of joining, N of them at once in any order.
        one_id: whether the second message has the task id of the first, and other arguments.
        raw: whether nothing is left out, to check that nothing is lost by what is.
    """

    messages: int = 3
    late: bool = False
    twice: int = 0
    deaths: int = 0
    dead_children: int = 0
    losses: int = 0
    reserved: bool = False
    purged: int = 0
    delays: int = 0
    stops: int = 0
    failures: int = 0
    limit: int = 0
    policy: Policy = Wait(max_waiting=100)  # noqa: RUF009 - it is frozen
    once: bool = False
    ordered: bool = False
    one_id: bool = False
    raw: bool = False
    clock: Clock = field(default_factory=Clock)
    count: int = 0
    broker: tuple[Message, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    started: frozenset[str] = frozenset()
    joined: tuple[str, ...] = ()  # messages that have not started, in the order of joining, if it counts
    ended: frozenset[str] = frozenset()  # messages, acknowledged late, of which a body has ended, or an end is stored
    unanswered: bool = False  # a message was skipped that never started, and none has started since
    latest: str = ""  # the message that took the place of others last
    gone: frozenset[str] = frozenset()  # messages that died with their worker, acknowledged before, or that were purged
    has_lost_data: bool = False
    error: str = ""  # what a step did that it must not do
    store: Any = None  # in memory, unless another one is given

    def __post_init__(self) -> None:
        self.store = self.store or MemoryStore(clock=self.clock)
        self.broker = tuple(Message(name) for name in self.names())
        if self.reserved:
            token = queued_token("m0")
            self.store.acquire(LeaseSpec(BASE, DIGEST, token, QUEUE_TTL, "m0", queued=True, limit=self.limit))

    def names(self) -> list[str]:
        """Return the names of all messages."""
        return [f"m{number}" if number != 1 or not self.one_id else "m0'" for number in range(self.messages)]

    def copy(self) -> World:
        """Return an independent world in the same state."""
        other = copy_of(self)
        other.clock = clock = Clock(self.clock.time)
        other.store = store = MemoryStore(clock=clock)
        store._records = {key: copy_of(record) for key, record in self.store._records.items()}
        if recent := store._records.get(f"{BASE}:recent"):
            recent.fences = dict(recent.fences or {})
        store._used = {key: dict(used) for key, used in self.store._used.items()}
        for key, line in self.store._lines.items():
            waiting = {ticket: copy_of(one) for ticket, one in line.waiting.items()}
            store._lines[key] = Line(clock, store._used[BASE], waiting, line.expires, newest=line.newest)
        return other

    # -- steps -----------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Return what may happen next without a fault. Time advances when nothing else can happen."""
        time = self.clock.time
        steps = [("deliver", place) for place, message in enumerate(self.broker) if message.ready <= time]
        steps += [(one.next, place) for place, one in enumerate(self.deliveries)]
        return steps or ([("time", 0)] if self.broker else [])

    def faults(self) -> Iterator[Step]:
        """Yield the faults that may happen next, and delays."""
        for place, delivery in enumerate(self.deliveries):
            yield from self._faults_at(place)
            if self.dead_children and delivery.next == "end":
                yield "child dies", place
        if self.deaths:
            yield from (("return copy", place) for place, one in enumerate(self.broker) if one.stays)
        ready = [(place, one) for place, one in enumerate(self.broker) if one.ready <= self.clock.time]
        if self.purged:
            yield from (("purge", place) for place, _ in ready)
        if self.twice:
            yield from (("deliver twice", place) for place, one in ready if not (one.ticket or one.redelivered))
        if self.losses:
            yield "lose data", 0
        is_between = any(one.next not in ("start", "end", "retry") for one in self.deliveries)
        if (self.stops if is_between else self.delays) and self.steps()[:1] not in ([], [("time", 0)]):
            yield ("stop" if is_between else "delay"), 0

    def _faults_at(self, place: int) -> Iterator[Step]:
        """Yield the faults that a delivery may meet in its next step."""
        delivery = self.deliveries[place]
        if delivery.next == "retry":  # its process may end, as any does
            yield "forget", place
        elif self.deaths:
            yield "die", place
        if self.failures and delivery.next in PUBLICATIONS:
            yield "fail", place
            yield "fail late", place

    def outcomes(self, step: Step) -> Iterator[tuple[World, tuple[Step, ...]]]:
        """Yield the states that a step leads to, and how: the last one without a further fault."""
        world = self.copy()
        world.do(step)
        yield from world._outcomes((step,))

    def _outcomes(self, path: tuple[Step, ...]) -> Iterator[tuple[World, tuple[Step, ...]]]:
        eager = self._eager()
        if eager is None:
            yield self, path
            return
        for step in (*self._faults_at(eager[1]), eager):
            world = self if step == eager else self.copy()
            world.do(step)
            yield from world._outcomes((*path, step))

    def choices(self) -> list[Step]:
        """Return what may happen next, faults included; the rest of a step comes first."""
        if eager := self._eager():
            return [eager, *self._faults_at(eager[1])]
        return [*self.steps(), *self.faults()]

    def _eager(self) -> Step | None:
        """Return the step that follows at once, if there is one: the first `acquire` of a delivery, a publication or the end.

        No behaviour is lost. Nothing else reads or changes what such a step uses, but for its faults, which `outcomes` inserts.
        So what others do before a publication may also happen after it, as a broker may deliver later, and what others do
        between a delivery and its `acquire` may also happen before the delivery.
        """
        if self.raw:
            return None
        return next(((one.next, place) for place, one in enumerate(self.deliveries) if one.next in EAGER), None)

    def do(self, step: Step) -> None:
        """Take a step."""
        name, place = step
        getattr(self, "_" + name.replace(" ", "_"))(place)
        if not (self.raw or self.losses):
            self.forget_dropped()

    def forget_dropped(self) -> None:
        """Take messages from the broker that would be dropped.

        No behaviour is lost: their delivery changes nothing, as another copy has started. The store knows that for as long as it
        has its data, unless the copy that started is delivered again.
        """
        used = self.store._used.get(BASE, {})
        delivered = [one.message for one in self.deliveries if self.late or one.next != "end"]
        alive = {(one.ticket, str(one.copy)) for one in (*self.broker, *delivered)}
        dropped = {ticket for ticket, (_, by) in used.items() if by != "superseded" and (ticket, by) not in alive}
        if dropped:
            self.broker = tuple(one for one in self.broker if one.ticket not in dropped)

    def is_over(self) -> bool:
        """Tell whether nothing is left to be done."""
        return not self.broker and not self.deliveries

    def waiting(self) -> list[str]:
        """Return the tickets of the messages that wait in line."""
        return [ticket for line in self.store._lines.values() for ticket in line.waiting]

    def holders(self) -> list[int]:
        """Return the slots that are held."""
        return list(self.store._held_slots(LOCK))

    def unfinished(self) -> frozenset[str]:
        """Return the messages whose bodies began, and that come again until one has ended, if the store keeps its data."""
        return self.started - self.ended if self.late and not self.has_lost_data else frozenset()

    def _publish(self, message: Message) -> None:
        self.broker = tuple(sorted((*self.broker, message)))

    def _take(self, place: int) -> Message:
        message = self.broker[place]
        self.broker = self.broker[:place] + self.broker[place + 1 :]
        return message

    def _set(self, delivery: Delivery, **changes: Any) -> None:
        changed = delivery._replace(**changes)
        self.deliveries = tuple(changed if one.number == delivery.number else one for one in self.deliveries)

    def _remove(self, delivery: Delivery) -> None:
        self.deliveries = tuple(one for one in self.deliveries if one.number != delivery.number)

    def _finish(self, delivery: Delivery) -> None:
        if self.late or delivery.message.is_copy:  # a copy is acknowledged after what follows it
            self._set(delivery, next="acknowledge")
        else:
            self._remove(delivery)

    def _acknowledge(self, place: int) -> None:
        self._remove(self.deliveries[place])

    def _deliver(self, place: int) -> None:
        message = self._take(place)
        self.count += 1
        place_in_line = Place(message.ticket, message.copy, stop=self.policy.stops_holder, identity=message.id)
        if message.is_copy:
            place_in_line = place_in_line._replace(due=COPY_DELAY + TTL)
        delivery = Delivery(self.count, message, "acquire", place_in_line, unfinished=message.unfinished)
        self.deliveries = (*self.deliveries, delivery)

    def _deliver_twice(self, place: int) -> None:
        message = self.broker[place]
        self.twice -= 1
        self._deliver(place)
        self._set(self.deliveries[-1], next="start")  # any time later: a worker has fetched it ahead
        self._publish(message._replace(redelivered=True))

    def _purge(self, place: int) -> None:
        self.purged -= 1
        self.gone |= {self._take(place).id}

    def _request(self, delivery: Delivery, place: Place | None) -> LeaseSpec:
        message = delivery.message
        queued = message.is_copy or delivery.is_retry
        spec = LeaseSpec(
            BASE,
            DIGEST,
            LINE_TOKEN if queued else delivery.token,
            TTL,
            message.task_id,
            redelivered=not queued and (message.redelivered or message.unfinished),
            queued=queued,
            limit=self.limit,
            comes_again=self.late and not queued,
        )
        spec.place = place
        if self.limit and delivery.next == "end":
            spec.use_slot(delivery.slot)
        return spec

    def _acquire(self, place: int) -> None:
        delivery = self.deliveries[place]
        result = self.store.acquire(self._request(delivery, delivery.place if self.policy.uses_line else None))
        if result.message:
            following = message_of(result.message)
            self._set(delivery, answer=result, before=delivery.next, next="publish named", following=following)
        else:
            self._answered(delivery, result)

    def _publish_named(self, place: int) -> None:
        self._publish(self._following(place))
        self._after_named(self.deliveries[place])

    def _after_named(self, delivery: Delivery) -> None:
        result = delivery.answer
        assert result
        delivery = delivery._replace(answer=None, following=None, next=delivery.before)
        self._set(delivery)
        self._answered(delivery, result)

    def _answered(self, delivery: Delivery, result: AcquireResult) -> None:
        if delivery.is_retry:
            self._retry_acquired(delivery, result)
        elif delivery.message.is_copy:
            self._copy_acquired(delivery, result)
        else:
            self._message_acquired(delivery, result)

    _start = _join = _retry = _acquire  # of a message that was fetched ahead; with room; of one that is published again

    def _message_acquired(self, delivery: Delivery, result: AcquireResult) -> None:
        message = delivery.message
        if delivery.place.replace and (result.is_waiting or result.status is AcquireStatus.GRANTED):
            self.latest = message.id
        if result.status is AcquireStatus.GRANTED:
            self._note_start(message)
            self._set(delivery, next="end", slot=result.slot)
        elif result.status is not AcquireStatus.REFUSED:
            if result.status is AcquireStatus.REPLACED:  # its end is stored
                self.ended |= {message.id}
            if result.status in (AcquireStatus.SUPERSEDED, AcquireStatus.REPLACED):
                self._note_skip(message)
            self._finish(delivery)
        elif delivery.next == "join" and result.is_waiting:
            if self.ordered and message.id not in self.joined:
                self.joined = (*self.joined, message.id)
            self._finish(delivery)
        else:
            self._message_held(delivery, result)

    def _message_held(self, delivery: Delivery, result: AcquireResult) -> None:
        message, is_redelivered = delivery.message, delivery.message.redelivered or delivery.message.unfinished
        if result.is_head and is_redelivered and not delivery.place.ticket:
            self._finish(delivery)
        elif result.holder is not None and result.holder.task_id == message.task_id:
            self._run_later(delivery, message._replace(redelivered=True))
        else:
            wish = self._wish(delivery, result)
            if wish is None:
                self._note_skip(message)
            if self.late and is_redelivered and not delivery.unfinished:
                self._set(delivery, next="ask begun", wish=wish)
            else:
                self._act(delivery, wish)

    def _ask_begun(self, place: int) -> None:
        delivery = self.deliveries[place]
        wish, delivery = delivery.wish, delivery._replace(wish=None)
        if self.store.has_begun(self._request(delivery, None)):
            delivery = delivery._replace(unfinished=True)
            wish = wish if isinstance(self.policy, Wait) else RunLater(STEP)
        self._act(delivery, wish)

    def _wish(self, delivery: Delivery, result: AcquireResult) -> Enqueue | RunLater | None:
        """Return how a duplicate is to wait, or None if it is not."""
        decision = self.policy.decide(
            Duplicate(
                result.holder or Holder(),
                own_retry=delivery.unfinished,
                waiting=result.waiting,
                head=result.head,
                is_waiting=result.is_waiting,
                has_waited=delivery.message.ticket != "",
                asked=result.asked,
            )
        )
        if isinstance(decision, Enqueue):
            return decision
        is_kept = delivery.unfinished and not isinstance(self.policy, Wait)  # see `delivery.decision.decide`
        return RunLater(STEP) if is_kept or isinstance(decision, RunLater) else None

    def _act(self, delivery: Delivery, wish: Enqueue | RunLater | None) -> None:
        """Let a duplicate wait, or end."""
        message, place = delivery.message, delivery.place
        if isinstance(wish, Enqueue):
            place = self._joining(delivery, wish)
            ready = self.clock.time + COPY_DELAY
            copy = Message(message.id, ready, place.ticket, place.next_copy, True, unfinished=delivery.unfinished)
            self._set(delivery, next="publish copy", place=place, following=copy)
        elif wish:
            later = message._replace(ticket=place.ticket, copy=place.copy, redelivered=False, unfinished=True)
            self._run_later(delivery, later)
        else:
            if message.id in self.unfinished() and (message.redelivered or message.unfinished):
                self.error = f"{message.id} was skipped after its body had begun"
            if place.ticket:
                self._set(delivery, next="leave")
            else:
                self._finish(delivery)

    def _run_later(self, delivery: Delivery, message: Message) -> None:
        self._set(delivery, next="publish later", following=message._replace(ready=self.clock.time + STEP))

    def _publish_later(self, place: int) -> None:
        self._publish(self._following(place))
        self._finish(self.deliveries[place]._replace(following=None))

    def _note_start(self, message: Message) -> None:
        limit = max(1, self.limit)
        if self.once and message.id in self.started:
            self.error = f"{message.id} started twice"
        if self.ordered:
            before = self.joined.index(message.id) if message.id in self.joined else 0
            is_newcomer = not message.ticket
            if before >= limit or (is_newcomer and len(self.waiting()) + len(self.holders()) > limit):
                self.error = f"{message.id} started before {self.joined}"
            self.joined = tuple(name for name in self.joined if name != message.id)
        self.started |= {message.id}
        self.unanswered = False

    def _note_skip(self, message: Message) -> None:
        if isinstance(self.policy, Wait):
            self.error = f"{message.id} was skipped"
        self.unanswered = self.unanswered or message.id not in self.started

    def _leave(self, place: int) -> None:
        delivery = self.deliveries[place]
        self._release_to(delivery, self.store.leave(self._request(delivery, None), delivery.place.ticket))

    def _copy_acquired(self, delivery: Delivery, result: AcquireResult) -> None:
        message = delivery.message
        if delivery.next == "join":
            if result.is_waiting:
                self._go_on(delivery)
                return
        elif result.status is AcquireStatus.REFUSED:
            wish = self._wish(delivery, result)
            if isinstance(wish, Enqueue) and result.is_waiting:
                self._go_on(delivery)
                return
            if isinstance(wish, Enqueue):
                self._set(delivery, next="join", place=self._joining(delivery, wish))
                return
        if result.status is AcquireStatus.DROPPED:
            self._finish(delivery)
        else:
            # A copy that is delivered again publishes its message once more, under another number.
            number = message.copy + 0.5 + delivery.number * 1e-6
            following = Message(message.id, 0.0, message.ticket, number, unfinished=message.unfinished)
            self._set(delivery, next="publish message", following=following)

    def _go_on(self, delivery: Delivery, delay: float = COPY_DELAY) -> None:
        """Have a copy be due again: it stays in its worker, or another one with a higher number is published before it ends."""
        self._publish(delivery.message._replace(ready=self.clock.time + delay, redelivered=False, stays=True))
        self._finish(delivery)

    def _publish_copy(self, place: int) -> None:
        self._publish(self._following(place))
        self._set(self.deliveries[place], next="join", following=None)

    def _joining(self, delivery: Delivery, wish: Enqueue) -> Place:
        """Return the place that a message joins the line with."""
        message = delivery.message
        # The number grows by 1 and a bit that no other copy has. A copy that stays in its worker keeps its number.
        following = message.copy if message.is_copy else math.floor(2 * message.copy) / 2 + 1 + delivery.number * 1e-4
        ticket = delivery.place.ticket or f"{message.id}.{delivery.number}"  # it has one if it had no room before
        text = Message(message.id, 0.0, ticket, message.copy + 0.5, unfinished=delivery.unfinished).text
        due = COPY_DELAY + TTL
        joining = Place(ticket, message.copy, wish.room, wish.replace, following, due, text, stop=wish.stop)
        return joining._replace(gives_way=wish.gives_way, identity=message.id)

    def _publish_message(self, place: int) -> None:
        self._publish(self._following(place))
        self._finish(self.deliveries[place]._replace(following=None))

    def _end(self, place: int) -> None:
        delivery = self.deliveries[place]
        self.ended |= {delivery.message.id} if self.late else set()
        redelivery_waits, text = self.store.release(self._request(delivery, None), True)
        if redelivery_waits:
            self.store.record_outcome(self._request(delivery, None), True)
        self._release_to(delivery, text)

    def _release_to(self, delivery: Delivery, text: str) -> None:
        """Let a delivery publish the message of the next in line, if there is one, and end."""
        if text:
            self._set(delivery, next="publish next", following=message_of(text))
        else:
            self._finish(delivery)

    def _publish_next(self, place: int) -> None:
        self._publish(self._following(place))
        self._finish(self.deliveries[place]._replace(following=None))

    # -- publications that fail --------------------------------------------------------------------

    def _following(self, place: int) -> Message:
        """Return what a delivery is to publish."""
        following = self.deliveries[place].following
        assert following
        return following

    def _fail_late(self, place: int) -> None:  # it arrives, and raises
        self._publish(self._following(place))
        self._fail(place)

    def _fail(self, place: int) -> None:
        self.failures -= 1
        delivery, following = self.deliveries[place], self._following(place)
        message, step = delivery.message, delivery.next
        delivery = delivery._replace(following=None)
        if step in ("publish copy", "publish later"):
            self._remove(delivery)
            if self.late:  # it is rejected
                self._publish(message._replace(redelivered=True))
            else:  # it fails visibly, or its other delivery runs
                self.gone |= {message.id}
        elif step == "publish message":
            self._set(delivery, next="give back", following=self._again(following))
        elif step == "publish again":
            self._give_back_later(delivery, following)
        else:
            self.count += 1
            retry = Delivery(self.count, following, "", Place(), is_retry=True)
            self.deliveries = (*self.deliveries, retry)
            self._give_back_later(retry, following)
            if step == "publish named":
                self._after_named(delivery)
            else:
                self._finish(delivery)

    def _again(self, message: Message) -> Message:
        """Return a message with another number, as a publication may have arrived all the same."""
        self.count += 1
        return message._replace(copy=math.floor(2 * message.copy) / 2 + self.count * 1e-4)

    def _give_back_later(self, retry: Delivery, message: Message) -> None:
        following = self._again(message)
        message = self._again(following)
        place = Place(message.ticket, -1.0)  # only a copy keeps its place
        self._set(retry, message=message, place=place, next="give back", following=following)

    def _give_back(self, place: int) -> None:
        delivery = self.deliveries[place]
        message = self._following(place)
        self.store.give_back(self._request(delivery, None), message.ticket, message.text)
        if delivery.is_retry:
            self._set(delivery, next="retry", following=None)
        else:
            self._go_on(delivery._replace(following=None), 0.0)

    def _retry_acquired(self, retry: Delivery, result: AcquireResult) -> None:
        if result.status is AcquireStatus.GRANTED:
            self._set(retry, next="publish again", following=retry.message)
        else:
            self._remove(retry)

    def _publish_again(self, place: int) -> None:
        self._publish(self._following(place))
        self._remove(self.deliveries[place])

    def _forget(self, place: int) -> None:
        self._remove(self.deliveries[place])

    # -- faults and time ---------------------------------------------------------------------------

    def _die(self, place: int) -> None:
        self.deaths -= 1
        self._ended_by_death(self.deliveries[place])

    def _child_dies(self, place: int) -> None:
        delivery = self.deliveries[place]
        self.dead_children -= 1
        supervised = self._request(delivery, None)
        supervised.comes_again = False  # a supervisor does not know how the body ended
        self.store.release(supervised, False)
        self._ended_by_death(delivery)

    def _ended_by_death(self, delivery: Delivery) -> None:
        message = delivery.message
        self._remove(delivery)
        if delivery.is_retry:
            return
        if self.late or message.is_copy:
            self._publish(message._replace(redelivered=not message.is_copy))
        elif delivery.next != "publish next":
            self.gone |= {message.id}

    def _return_copy(self, place: int) -> None:
        self.deaths -= 1
        copy = self._take(place)
        self._publish(copy._replace(ready=self.clock.time, stays=False))

    def _lose_data(self, _: int) -> None:
        self.losses -= 1
        self.has_lost_data = True
        self.deliveries = tuple(one._replace(old=one.next == "end") for one in self.deliveries)
        for data in (self.store._records, self.store._lines, self.store._used):
            data.clear()

    def _stop(self, _: int) -> None:
        self.stops -= 1
        self._time(0)

    def _delay(self, _: int) -> None:
        self.delays -= 1
        self._time(0)

    def _time(self, _: int) -> None:
        self.clock.time += STEP
        assert self.clock.time < COPY_TTL  # else marks of copies that have started expire, and the key does not tell
        for delivery in self.deliveries:
            if delivery.next == "end":
                spec = self._request(delivery, None)
                if self.store.renew([spec]) == [RenewResult.MISSING]:
                    self.store.reacquire(spec, delivery.number)


def message_of(text: str) -> Message:
    """Return the message that a text of the line stands for."""
    name, ticket, number, unfinished = text.split()
    return Message(name, 0.0, ticket, float(number), unfinished=unfinished == "1")


def copy_of(one: Any) -> Any:
    """Return a copy of a dataclass: `copy.copy` is five times as slow."""
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__)
    return other
