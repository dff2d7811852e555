"""Explores all states of messages that wait in line, with the faults that the library is to survive.

Each world of `WORLDS` is exhausted in each check (`tox -e model`), and those of `LARGE` at night (`tox -e model-large`): no state
is left then. That is over the store in memory. Walks at random go through all of these worlds over the scripts on Redis, too.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock import Raise, Replace, RunOnceMore, Skip
from tests.contract.clocked import ClockedRedisStore
from tests.contract.sequences import BEGINNING
from tests.model.both import world_on_both
from tests.model.explore import Explored, walk
from tests.model.promises import check
from tests.model.world import World
from tests.servers import RedisServer

pytestmark = pytest.mark.long

#: Whether large worlds are explored, too. Else each of them gets so many walks.
EXPLORES_ALL = os.environ.get("MODEL") == "all"
WALKS = 500
#: So many walks go through each world on both stores.
WALKS_ON_BOTH = 1000 if EXPLORES_ALL else 25

SLOW = {"delays": 2}
WORLDS: dict[str, dict[str, Any]] = {
    "no fault": {"once": True, "ordered": True},
    "slow bodies and queues": {"once": True, "delays": 5},
    "four messages, slow bodies and queues": {"once": True, "messages": 4, "delays": 3},
    # Not with `RunOnceMore(keep="latest")` and `Replace()`: a worker may stop for a TTL between publishing a copy and joining the
    # line. If it joins at the moment when the message, published by that copy, leaves, then that message does not run.
    "slow workers": {"delays": 2, "stops": 2},
    "a worker dies": {"once": True, "deaths": 1, "delays": 3},
    "a worker dies, late acknowledgement": {"deaths": 1, "late": True, "delays": 1},
    "a child dies": {"once": True, "dead_children": 1, "delays": 3},
    "a child dies, late acknowledgement": {"dead_children": 1, "late": True, **SLOW},
    "the store loses its data": {"losses": 1, **SLOW},
    "a message is delivered twice": {"twice": 1, **SLOW},
    "a reservation": {"once": True, "reserved": True, "delays": 3},
    "a reservation whose message is purged": {"once": True, "reserved": True, "purged": 1, "delays": 3},
    "three at once": {"once": True, "ordered": True, "limit": 3, "messages": 6},
    "two at once, slow bodies and queues": {"once": True, "limit": 2, "messages": 4, "delays": 3},
    "two at once, a worker dies": {"once": True, "deaths": 1, "limit": 2, "messages": 4, "delays": 1},
    "two at once, a worker dies, late acknowledgement": {"deaths": 1, "late": True, "limit": 2, "messages": 4},
    "two at once, a child dies": {"once": True, "dead_children": 1, "limit": 2, "messages": 4, "delays": 1},
    "two at once, the store loses its data": {"losses": 1, "limit": 2, "messages": 4, "delays": 1},
    "two at once, a message is delivered twice": {"twice": 1, "limit": 2, "delays": 1},
    "two at once, a reservation": {"once": True, "reserved": True, "limit": 2, "messages": 4, **SLOW},
    "two at once, a reservation whose message is purged": {
        "once": True,
        "reserved": True,
        "purged": 1,
        "limit": 2,
        "messages": 4,
        "delays": 1,
    },
    "a worker dies, and the store loses its data": {"deaths": 1, "losses": 1, "late": True, "messages": 2, **SLOW},
    "a publication fails": {"once": True, "failures": 1, "delays": 3},
    # With more delays, not with the policies above: a copy that arrived, though its publication raised, has no place in line. It
    # may run its message again after its TTL, in the place of a later message.
    "a publication fails, late acknowledgement": {"failures": 1, "late": True, "delays": 1},
    "two publications fail": {"once": True, "failures": 2, "delays": 1},
    "a publication fails, and a worker dies": {"once": True, "failures": 1, "deaths": 1},
    "a publication fails, and a worker dies, late acknowledgement": {
        "failures": 1,
        "deaths": 1,
        "late": True,
        "messages": 2,
    },
    "a publication fails, and the store loses its data": {"failures": 1, "losses": 1},
    "a reservation, and a publication fails": {"once": True, "reserved": True, "failures": 1, "delays": 1},
    "two at once, a publication fails": {"once": True, "failures": 1, "limit": 2, "messages": 4, "delays": 1},
    "two at once, a publication fails, late acknowledgement": {
        "failures": 1,
        "late": True,
        "limit": 2,
        "messages": 4,
    },
    "each message is delivered twice": {"twice": 3},
    "two messages with one task id": {"once": True, "one_id": True, "delays": 5},
    "two messages with one task id, slow workers": {"one_id": True, "delays": 2, "stops": 2},
    "two messages with one task id, late acknowledgement": {"once": True, "one_id": True, "late": True, "delays": 5},
    "two messages with one task id, a publication fails": {"once": True, "one_id": True, "failures": 1, "delays": 3},
    "two messages with one task id, a child dies": {"once": True, "one_id": True, "dead_children": 1, "delays": 3},
    "two messages with one task id, a worker dies": {"once": True, "one_id": True, "deaths": 1, "delays": 3},
    "two messages, all faults": {"messages": 2, "twice": 2, "deaths": 1, "losses": 1},
    "two messages, all faults, late acknowledgement": {
        "messages": 2,
        "twice": 1,
        "deaths": 1,
        "losses": 1,
        "late": True,
    },
}
#: Two deliveries of each of three messages, a holder that dies, and a loss of data.
ALL = {"twice": 3, "deaths": 1, "losses": 1}
LARGE: dict[str, dict[str, Any]] = {
    "all faults": ALL,
    "all faults, a reservation": {**ALL, "reserved": True},
    "all faults, two at once": {**ALL, "limit": 2},
    "all faults, late acknowledgement": {**ALL, "twice": 1, "late": True},
    "each message is delivered twice, slow bodies and queues": {"twice": 3, "delays": 1},
    "two messages, all faults, slow bodies and queues": {**ALL, "messages": 2, "twice": 2, "delays": 1},
    "all faults, and a publication fails": {**ALL, "twice": 1, "failures": 1},
    "a publication fails, late acknowledgement, slow bodies and queues": {"failures": 1, "late": True, "delays": 3},
    "two publications fail, and a worker dies": {"once": True, "failures": 2, "deaths": 1, "delays": 1},
    "two publications fail, and a worker dies, late acknowledgement": {"failures": 2, "deaths": 1, "late": True},
    "two messages, a publication fails, and two workers die": {
        "failures": 1,
        "deaths": 2,
        "late": True,
        "messages": 2,
    },
}
POLICIES = {"first": RunOnceMore(), "latest": RunOnceMore(keep="latest"), "replace": Replace(grace=math.inf)}
for policy in POLICIES:
    for name in (
        "no fault",
        "slow bodies and queues",
        "a worker dies",
        "a worker dies, late acknowledgement",
        "a child dies, late acknowledgement",
        "the store loses its data",
        "a publication fails",
        "a publication fails, late acknowledgement",
        "a reservation",
    ):
        options = {**WORLDS[name], "ordered": False, "once": False}
        WORLDS[f"{policy}, {name}"] = {**options, "policy": POLICIES[policy]}
    LARGE[f"{policy}, each message is delivered twice"] = {"twice": 3, "policy": POLICIES[policy]}
    LARGE[f"{policy}, all faults"] = {**ALL, "twice": 1, "policy": POLICIES[policy]}
    for name in ("two messages, all faults", "two messages, all faults, late acknowledgement"):
        LARGE[f"{policy}, {name}"] = {**WORLDS[name], "policy": POLICIES[policy]}
    name = "two messages, two publications fail, and a worker dies"
    LARGE[f"{policy}, {name}"] = {"failures": 2, "deaths": 1, "late": True, "messages": 2, "policy": POLICIES[policy]}
#: Policies that do not use the line, where a redelivered message is a duplicate.
for policy, without_line in {"skip": Skip(), "raise": Raise()}.items():
    for name in ("a worker dies, late acknowledgement", "a child dies, late acknowledgement"):
        WORLDS[f"{policy}, {name}"] = {**WORLDS[name], "policy": without_line}
ALL_WORLDS = {**WORLDS, **LARGE}


@pytest.fixture
def on_redis(redis_server: RedisServer) -> Iterator[ClockedRedisStore]:
    """Yield a store on the run's Redis whose clock the world sets."""
    store = ClockedRedisStore(redis_server.url(), BEGINNING)
    yield store
    store.close()


def explore(options: dict[str, Any]) -> Explored:
    """Explore a world, and check all that it promises."""
    explored = Explored(World(**options), check)
    explored.check_that_all_ends()
    return explored


def walk_on_both(on_redis: ClockedRedisStore, name: str) -> None:
    """Walk through a world on both stores."""
    generator = random.Random(name)
    for _ in range(WALKS_ON_BOTH):
        walk(world_on_both(on_redis, **ALL_WORLDS[name]), generator)


@pytest.mark.parametrize("name", WORLDS)
def test_every_state(name: str) -> None:
    """In every state: one body at a time; nothing is lost; nobody waits for ever."""
    print(f"{name}: {len(explore(WORLDS[name]).seen)} states")


@pytest.mark.skipif(not EXPLORES_ALL, reason="explored by `tox -e model-large`")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LARGE)
def test_every_state_of_a_large_world(name: str) -> None:
    """The same with all faults."""
    print(f"{name}: {len(explore(LARGE[name]).seen)} states")


@pytest.mark.skipif(EXPLORES_ALL, reason="explored")
@pytest.mark.parametrize("name", LARGE)
def test_walks_through_a_large_world(name: str) -> None:
    """The same in the states that orders at random reach."""
    generator = random.Random(name)
    for _ in range(WALKS):
        walk(World(**LARGE[name]), generator)


@pytest.mark.parametrize("name", ALL_WORLDS)
def test_walks_on_both_stores(name: str, on_redis: ClockedRedisStore) -> None:
    """The same in the states that orders at random reach, where the scripts on Redis answer each call as the store in memory."""
    walk_on_both(on_redis, name)
