"""Explores the states of messages that wait in line, with the faults that the library is to survive."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest

from celery_singleton_lock import Replace, RunOnceMore, Wait
from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest, Place
from tests.model.world import BASE, DIGEST, TTL, Step, World

#: Longest way to the end without further faults, in steps.
ENOUGH = 400
#: How many states are looked at. The exhaustive run is for a change of the protocol: it takes minutes.
STATES = int(os.environ.get("MODEL_STATES", "3000"))
#: The share of it for a world with a policy of its own: there are many.
SHARE = 1 / 6

#: Two deliveries of each of three messages, a holder that dies, and a loss of data.
ALL = {"twice": 3, "deaths": 1, "losses": 1}
WORLDS: dict[str, dict[str, Any]] = {
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
    "three at once": {"steps": 0, "limit": 3, "messages": 6},
    "two at once, slow workers": {"steps": 6, "limit": 2, "messages": 4},
    "two at once, a worker dies": {"deaths": 1, "limit": 2, "messages": 4},
    "two at once, a worker dies, late acknowledgement": {"deaths": 1, "late": True, "limit": 2, "messages": 4},
    "two at once, a child dies": {"dead_children": 1, "limit": 2, "messages": 4},
    "two at once, the store loses its data": {"losses": 1, "limit": 2, "messages": 4},
    "two at once, a message is delivered twice": {"twice": 1, "limit": 2},
    "two at once, a reservation": {"reserved": True, "limit": 2, "messages": 4},
    "two at once, a reservation whose message is purged": {"reserved": True, "purged": 1, "limit": 2, "messages": 4},
    "a worker dies, and the store loses its data": {"deaths": 1, "losses": 1, "late": True, "messages": 2},
    "all faults": ALL,
    "all faults, late acknowledgement": {**ALL, "late": True},
    "all faults, a reservation": {**ALL, "reserved": True},
    "all faults, two at once": {**ALL, "limit": 2},
}
POLICIES = {"first": RunOnceMore(), "latest": RunOnceMore(keep="latest"), "replace": Replace(grace=math.inf)}
WORLDS |= {
    f"{policy}, {name}": {**WORLDS[name], "policy": POLICIES[policy]}
    for policy in POLICIES
    for name in (
        "no fault",
        "slow workers",
        "a worker dies",
        "a child dies, late acknowledgement",
        "the store loses its data",
        "a reservation",
        "all faults, late acknowledgement",
    )
}


def check(world: World, history: list[Step]) -> None:
    """Check what holds in every state."""
    if not world.has_lost_data:
        assert len(world.running()) <= max(1, world.limit), history


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
    skipped = {name for name, _ in world.skipped}
    assert names - set(world.started) <= world.gone | skipped, f"lost {names - set(world.started)}: {history}"
    check_skips(world, history)
    if exactly_once:
        assert len(world.started) == len(set(world.started)), f"ran twice {world.started}: {history}"
    world.time += 3 * TTL
    for number in range(max(1, world.limit)):
        name = f"newcomer {number}"
        newcomer = world.store.acquire(LeaseRequest(BASE, DIGEST, name, TTL, name, place=Place(), limit=world.limit))
        assert newcomer.status is AcquireStatus.GRANTED, f"{name} has to wait: {history}"


def check_skips(world: World, history: list[Step]) -> None:
    """Check that no message is skipped unless another one runs in its place."""
    if isinstance(world.policy, Wait):
        assert () == world.skipped, history
    elif world.policy == RunOnceMore():
        starts = [before for _, before in world.skipped]
        assert max(starts, default=-1) < len(world.started) or world.gone, f"nobody ran after a skip: {history}"
    elif not world.has_lost_data:
        assert {world.latest} <= {"", *world.started, *world.gone}, f"the last one did not run: {history}"


def check_order(world: World, history: list[Step]) -> None:
    """Check that messages that wait start before newcomers, in the order of joining, N of them at once in any order."""
    assert () == world.overtaking, history
    order = [name for name in world.started if name in world.joined]
    joined = [name for name in dict.fromkeys(world.joined) if name in order]
    for number, name in enumerate(order):
        overtaken = [one for one in joined[: joined.index(name)] if one in order[number:]]
        assert len(overtaken) < max(1, world.limit), f"{order} instead of {joined}: {history}"


@pytest.mark.parametrize("name", WORLDS)
def test_every_state(name: str) -> None:
    """From each state that the explored orders of steps reach: one body at a time; nothing lost; nobody waits for ever."""
    options = WORLDS[name]
    most = STATES * (SHARE if "policy" in options else 1)
    generator = random.Random(name)
    first = World(**options)
    seen = {first.key()}
    states: list[tuple[World, list[Step]]] = [(first, [])]
    while states and len(seen) < most:
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
            if options.get("steps") == 0:
                check_order(end, path)
            states.append((following, path))
