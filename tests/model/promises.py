"""What holds in each state of a world."""

from __future__ import annotations

from celery_singleton_lock import RunOnceMore, Wait
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec, Place
from tests.model.world import BASE, DIGEST, TTL, World


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
    names = {f"m{number}" for number in range(world.messages)}
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
        name = f"newcomer {number}"
        newcomer = world.store.acquire(LeaseSpec(BASE, DIGEST, name, TTL, name, place=Place(), limit=world.limit))
        assert newcomer.status is AcquireStatus.GRANTED, f"{name} has to wait"
