"""The key of a state: equal for states in which the same can happen, up to the names of messages, tickets and tokens.

A key has all that a step or a check reads, except for what only expires after `COPY_TTL`. So no behaviour is lost:

* Times count from now, as steps only compare times. What has expired, or is ready, is as good as what has been so for longer.
* All messages are equal at the beginning, so the facts of each message stand together, without its name, and are sorted. A ticket
  or a token is told by what has it, in the same way.
* Numbers of copies are compared within a ticket only, and a new one is made from an older one by `World._publish_copy`. So their
  distances in halves count, and the order of the bits that were added: the bit of a new one is the greatest.
* Notes on a ticket that no message has any more are not read again.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import defaultdict
from typing import Any

from celery_singleton_lock.store.memory.line import identity_in
from celery_singleton_lock.store.memory.records import Record
from tests.model.world import BASE, LOCK, Delivery, World, message_of

#: Of each message, by ticket: what it is and where, and numbers of copies.
Facts = dict[str, dict[str, list[tuple[tuple[Any, ...], tuple[float, ...]]]]]


def key(world: World) -> bytes:
    """Return the digest of a state."""
    # Version 2 of the format depends on values alone. That two of 10 million states have one digest has a probability of 1e-15.
    return hashlib.blake2b(marshal.dumps(canonical(world), 2), digest_size=12).digest()


def canonical(world: World) -> Any:
    """Return a state in the form that is equal for equal ones."""
    facts: Facts = {name: defaultdict(list) for name in world.names()}
    now, store = world.clock.time, world.store
    for one in world.broker:
        marks = (one.is_copy, one.redelivered, one.unfinished, one.stays and world.deaths > 0)
        fact = ("broker", max(0.0, one.ready - now), *marks)
        facts[one.id][one.ticket].append((fact, (one.copy,)))
    owned = _locks(world)
    for delivery in world.deliveries:
        _note_delivery(world, facts, delivery, owned.pop(delivery.token, None))
    for record, lock in owned.values():  # of no delivery that is there: whether one was redelivered is not read
        facts[record.task_id][""].append((("lock", lock), ()))
    for line in store._lines.values():
        for position, (ticket, one) in enumerate(line.waiting.items()):
            late = max(0.0, one.due - now + 1)
            text = (message_of(one.message),) if one.message else ()
            marks = (ticket == line.newest, any(message.unfinished for message in text))
            numbers = (one.copy, *(message.copy for message in text))
            facts[identity_in(ticket)][ticket].append((("line", position, late, *marks), numbers))
    faults = (world.twice, world.deaths, world.dead_children, world.losses, world.purged, world.delays, world.stops)
    faults = (*faults, world.failures)
    return (
        faults,
        world.error,
        world.unanswered,
        sorted([_message(world, name, tickets) for name, tickets in facts.items()]),
    )


def _locks(world: World) -> dict[str, tuple[Record, Any]]:
    """Return each lock and its state, by its token; the order of several tells the oldest."""
    now, locks = world.clock.time, {}
    held = [(key, one) for key, one in world.store._records.items() if key.startswith(LOCK) and one.expires > now]
    fences = sorted(one.fence for _, one in held)
    for index, (key, one) in enumerate(held):
        order = (key[len(LOCK) :], index, fences.index(one.fence)) if world.limit else ()
        locks[one.token] = one, (order, one.expires - now, one.state, one.token[:6], one.named, one.line)
    return locks


def _note_delivery(world: World, facts: Facts, delivery: Delivery, owned: Any) -> None:
    message, place, numbers = delivery.message, delivery.place, (delivery.message.copy,)
    ticket = place.ticket
    marks = (message.redelivered, message.unfinished, delivery.unfinished)
    fact = (delivery.next, message.is_copy, message.ticket != "", delivery.is_retry, repr(delivery.wish), *marks)
    if delivery.next == "end":
        record, lock = owned or (None, ())
        marks = (record.redelivered, record.stop == delivery.token) if record else ()
        fact = (delivery.next, delivery.slot, delivery.old, lock, marks)
        if world.late and (world.deaths or world.dead_children):
            fact = (*fact, message.redelivered, message.unfinished)
        else:  # the message does not come again
            ticket, numbers = "", ()
    elif place.room:
        numbers = (*numbers, place.next_copy)
    facts[message.id][ticket].append((fact, numbers))
    if after := delivery.following:
        facts[after.id][after.ticket].append((("following",), (after.copy,)))


def _message(world: World, name: str, tickets: dict[str, list[Any]]) -> Any:
    """Return what a message has."""
    used = world.store._used.get(BASE, {})
    task_id = name.rstrip("'")
    notes = [key[len(BASE) : -len(task_id)] for key in world.store._records if key.endswith(f":{task_id}")]
    joined = world.joined.index(name) + 1 if name in world.joined else 0
    told = (name in world.started, name in world.gone, name in world.ended, name == world.latest, joined)
    told = (*told, world.one_id and task_id == "m0")
    return told, sorted(notes), sorted([_ticket(ticket, used, own) for ticket, own in tickets.items()])


def _ticket(ticket: str, used: dict[str, tuple[float, str]], facts: list[Any]) -> Any:
    """Return what a ticket has, with the numbers of copies as halves and ranks."""
    numbers = {number for _, own in facts for number in own}
    halves = {number: int(2 * number) for number in numbers}
    added = {number: round(number - halves[number] / 2, 9) for number in numbers}
    ranks, lowest = sorted(set(added.values())), min(halves.values(), default=0)
    names = {number: (halves[number] - lowest, ranks.index(added[number])) for number in numbers}
    by: tuple[int, ...] = ()
    if ticket in used:
        by = (1,) if used[ticket][1] == "superseded" else names.get(float(used[ticket][1] or -1), (2,))
    return ticket != "", by, sorted([(fact, [names[number] for number in own]) for fact, own in facts])
