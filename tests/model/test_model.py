"""Checks the model: that what it leaves out loses nothing, and that it finds what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import closing
from typing import Any

import pytest

from celery_singleton_lock import Replace, RunOnceMore
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.memory.line import Line
from celery_singleton_lock.store.protocol import AcquireResult, Released
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.clocked import ClockedRedisStore
from tests.contract.sequences import BEGINNING
from tests.model.canonical import key
from tests.model.explore import Explored
from tests.model.promises import check
from tests.model.test_line import WORLDS, explore, walk_on_both
from tests.model.world import EAGER, Delivery, Message, World
from tests.servers import RedisServer

pytestmark = [pytest.mark.long, pytest.mark.harness]

TWO = {"messages": 2}
LATEST, REPLACE = RunOnceMore(keep="latest"), Replace(grace=math.inf)


def everything(world: World) -> str:
    """Return all that a state has, under its own names."""
    store, copied = world.store, {**vars(world), "store": None, "clock": None, "count": 0}
    lines = [line.waiting for line in store._lines.values()]
    return repr((copied, store._records, lines, store._used, world.clock.time))


@pytest.mark.parametrize(
    "options",
    [
        {"twice": 1, "losses": 1, **TWO},
        {"deaths": 1, "losses": 1, **TWO},
        {"deaths": 1, "late": True, **TWO},
        {"deaths": 1, "late": True, "policy": LATEST, **TWO},
        {"twice": 1, "deaths": 1, "reserved": True, **TWO},
        {"twice": 1, "dead_children": 1, "policy": REPLACE, **TWO},
        {"losses": 1, "limit": 2},
        {"failures": 1, "delays": 1, **TWO},
        {"failures": 1, "late": True, **TWO},
        {"failures": 1, "deaths": 1, "policy": LATEST, **TWO},
    ],
    ids=str,
)
def test_nothing_is_lost_by_what_is_left_out(options: dict[str, Any]) -> None:
    """A world whose states are told by all that they have, and each of whose steps is taken alone, reaches the same states."""
    assert states(World(raw=True, **options), everything) == states(World(**options), key)


def states(first: World, key_of: Callable[[World], Hashable]) -> set[bytes]:
    """Return the keys of all states between two steps, as if what is dropped were forgotten, but for the ends.

    At the end, time may go on until the last copies have come, to be dropped.
    """
    found = set()

    def note(world: World) -> None:
        check(world)
        world = world.copy()
        if not world.losses:
            world.forget_dropped()
        if not (world.is_over() or any(one.next in EAGER for one in world.deliveries)):
            found.add(key(world))

    Explored(first, note, key_of).check_that_all_ends()
    return found


def endless_reservation(store: MemoryStore, line: Line | None, lock: str, ttl: float) -> str:
    return NAME_NEXT(store, line, lock, math.inf)


def ticket_not_used(line: Line, ticket: str, by: str) -> None:
    line.remove(ticket)


def release_by_anybody(store: MemoryStore, spec: LeaseSpec, *_: Any, **__: Any) -> Released:
    store._records.pop(spec.lock, None)
    return Released()


def no_delayed_copy(world: World, place: int) -> None:
    PUBLISH_COPY(world, place)
    world.broker = tuple(one for one in world.broker if not one.is_copy)


def never_begun(store: MemoryStore, spec: LeaseSpec) -> bool:
    return False


def same_number(world: World, message: Message) -> Message:
    return message


def dropped_while_first(world: World, delivery: Delivery, result: AcquireResult) -> None:
    if result.head == delivery.message.id:
        world._finish(delivery)
    else:
        MESSAGE_HELD(world, delivery, result)


def line_ignored(line: Line, ticket: str = "", replace: str = "") -> str:
    return ticket


NAME_NEXT, PUBLISH_COPY, MESSAGE_HELD = MemoryStore._name_next, World._publish_copy, World._message_held


@pytest.mark.parametrize(
    ("place", "name", "mutant", "world"),
    [
        (MemoryStore, "_name_next", endless_reservation, "a reservation whose message is purged"),
        (MemoryStore, "release", release_by_anybody, "the store loses its data"),
        (Line, "use", ticket_not_used, "no fault"),
        (Line, "head", line_ignored, "no fault"),
        (MemoryStore, "has_begun", never_begun, "first, a child dies, late acknowledgement"),
        (MemoryStore, "has_begun", never_begun, "skip, a child dies, late acknowledgement"),
        (World, "_publish_copy", no_delayed_copy, "a worker dies"),
        (World, "_again", same_number, "a publication fails"),
        (World, "_message_held", dropped_while_first, "a child dies, late acknowledgement"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_defect_is_found(place: type, name: str, mutant: Any, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store, or a worker, with a defect breaks a promise."""
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        explore(WORLDS[world])


def test_a_defect_on_redis_is_found(redis_server: RedisServer) -> None:
    """A script with a defect answers a call differently."""
    store = ClockedRedisStore(
        redis_server.url(), BEGINNING, alter=lambda script: script.replace("is_turn = rank < free", "is_turn = true")
    )
    with closing(store), pytest.raises(AssertionError, match="on Redis"):
        walk_on_both(store, "two at once, a worker dies")
