"""What holds in each state of a world."""

from __future__ import annotations

from celery_singleton_lock import RunOnceMore, Wait
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec, Place
from tests.model.world import BASE, DIGEST, TTL, World, message_of


def check(world: World) -> None:
    """Check what holds in every state, and once nothing is left to be done."""
    check_now(world)
    if world.is_over():
        check_end(world.copy())


def check_now(world: World) -> None:
    """Check what holds in every state."""
    assert "" == world.error, world.error
    # After a loss of data, each body that ran then may run beside others, but those exclude each other.
    running = [one.token for one in world.deliveries if one.next == "end" and not one.old]
    assert len(running) <= max(1, world.limit), f"{running} run at once"


def check_end(world: World) -> None:
    """Check what holds once nothing is left to be done; newcomers change the world."""
    names = set(world.names())
    ran = world.started | world.gone
    assert not world.unfinished(), f"{world.unfinished()} began and never ended"
    if isinstance(world.policy, Wait):
        assert names <= ran, f"lost {names - ran}"
    elif world.policy == RunOnceMore():
        assert not world.unanswered or world.gone, "nobody ran after a skip"
    elif not world.has_lost_data:
        assert {world.latest} <= {"", *ran}, f"the last one, {world.latest}, did not run"
    world.clock.time += 3 * TTL
    for number in range(max(1, world.limit)):
        check_newcomer(world, f"newcomer {number}")


def check_newcomer(world: World, name: str) -> None:
    """Check that a newcomer waits for nobody but those that it has published itself.

    A text may be left in the line. A message that came twice has two places; the copy of one ends while its other delivery runs,
    and that may die.
    """
    spec = LeaseSpec(BASE, DIGEST, name, TTL, name, place=Place(), limit=world.limit)
    result = world.store.acquire(spec)
    text = result.message
    while text:
        left = message_of(text)
        place = Place(left.ticket, left.copy)
        started = LeaseSpec(BASE, DIGEST, f"token of {text}", TTL, left.task_id, place=place, limit=world.limit)
        assert world.store.acquire(started).status is AcquireStatus.GRANTED, f"{text} has to wait"
        text = world.store.release(started, True).message
    if result.message:
        result = world.store.acquire(spec)
    assert result.status is AcquireStatus.GRANTED, f"{name} has to wait"
