"""Explores the states of messages that wait in line, with the faults that the library is to survive."""

from __future__ import annotations

import os
import random

import pytest

from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest, Place
from tests.model.world import BASE, DIGEST, TTL, Step, World

#: Longest way to the end without further faults, in steps.
ENOUGH = 400
#: How many states are looked at. The exhaustive run is for a change of the protocol: it takes minutes.
STATES = int(os.environ.get("MODEL_STATES", "3000"))

WORLDS = {
    "no fault": {"steps": 0},
    "slow workers": {"steps": 6},
    "a worker dies": {"deaths": 1},
    "a worker dies, late acknowledgement": {"deaths": 1, "late": True},
    "a child dies": {"dead_children": 1},
    "a child dies, late acknowledgement": {"dead_children": 1, "late": True},
    "the store loses its data": {"losses": 1},
    "a message is delivered twice": {"twice": 1, "messages": 2},
    "a reservation": {"reserved": True},
    "a reservation whose message is purged": {"reserved": True, "purged": 1},
    "a worker dies, and the store loses its data": {"deaths": 1, "losses": 1, "late": True, "messages": 2},
}


def check(world: World, history: list[Step]) -> None:
    """Check what holds in every state."""
    if not world.has_lost_data:
        assert len(world.running()) <= 1, history


def run_to_the_end(world: World, history: list[Step]) -> World:
    """Take the steps that a system without further faults takes, and return its end."""
    world = world.copy()
    world.deaths = world.dead_children = world.losses = world.twice = world.purged = 0
    for _ in range(ENOUGH):
        if world.is_over():
            return world
        step = next((step for step in world.choices() if step[0] != "time"), ("time", 0))
        world.do(step)
        check(world, history)
    raise AssertionError(f"never ends: {history}")


def check_end(world: World, history: list[Step], exactly_once: bool) -> None:
    """Check what holds once nothing is left to be done."""
    names = {f"m{number}" for number in range(world.messages)}
    assert names - set(world.started) <= world.gone, f"lost {names - set(world.started)}: {history}"
    if exactly_once:
        assert len(world.started) == len(set(world.started)), f"ran twice {world.started}: {history}"
    world.time += 3 * TTL
    newcomer = world.store.acquire(LeaseRequest(BASE, DIGEST, "token", TTL, "newcomer", place=Place()))
    assert newcomer.status is AcquireStatus.GRANTED, f"a newcomer has to wait: {history}"


def check_order(world: World, history: list[Step]) -> None:
    """Check that messages that have waited start in the order in which they joined."""
    order = [name for name in world.started if name in world.joined]
    joined = list(dict.fromkeys(world.joined))
    assert order == [name for name in joined if name in order], f"{order} instead of {joined}: {history}"


@pytest.mark.parametrize("name", WORLDS)
def test_every_state(name: str) -> None:
    """From each state that the explored orders of steps reach: one body at a time; nothing lost; nobody waits for ever."""
    options = WORLDS[name]
    generator = random.Random(name)
    first = World(**options)
    seen = {first.key()}
    states: list[tuple[World, list[Step]]] = [(first, [])]
    while states and len(seen) < STATES:
        # A state at random: with a bound on the number of states, long orders are looked at too.
        place = generator.randrange(len(states))
        states[place], states[-1] = states[-1], states[place]
        world, history = states.pop()
        for step in list(world.choices()):
            following = world.copy()
            following.do(step)
            if (key := following.key()) in seen:
                continue
            seen.add(key)
            path = [*history, step]
            check(following, path)
            end = run_to_the_end(following, path)
            exactly_once = not ({"twice", "late", "losses"} & set(options))
            check_end(end, path, exactly_once)
            if name == "no fault":
                check_order(end, path)
            states.append((following, path))
