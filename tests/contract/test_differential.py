"""The stores answer alike to whatever they are asked, in any order and at any time.

The same sequences of calls are played in each run. ``SEQUENCES=20000`` plays so many others, other ones each time. (The sequences
that hypothesis makes resemble each other too much: of the mutants of scripts, they found fewer, in ten times as long.)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.store.memory.line import Line
from tests.contract.clocked import ClockedRedisStore
from tests.contract.conftest import MemoryBacking, check_balance
from tests.contract.sequences import BEGINNING, Player, Setup, Step, difference, random_sequence
from tests.servers import RedisServer

SEQUENCES = int(os.environ.get("SEQUENCES") or 0)
BASE = "differential:{task}"


@pytest.fixture
def on_redis(redis_server: RedisServer) -> Iterator[Callable[..., ClockedRedisStore]]:
    """Yield a function that makes stores on the run's Redis whose clock the test sets."""
    made = []

    def make(**options: Any) -> ClockedRedisStore:
        made.append(ClockedRedisStore(redis_server.url(), BEGINNING, history=5, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def difference_in(store: ClockedRedisStore, setup: Setup, sequence: Sequence[Step]) -> str:
    """Play a sequence on this store and on one in memory; return how they differ, or that the records do not balance."""
    memory = MemoryBacking(BEGINNING)
    store.lose()
    players = [
        Player(memory.store, memory.set_time, memory.lose, BASE, setup),
        Player(store, store.set_time, store.lose, BASE, setup),
    ]
    try:
        found = difference(players, sequence)
        if not found and not any(step.loses for step in sequence):
            check_balance(store.records(), BASE)
    except (AssertionError, StoreError) as error:
        return f"{[*map(str, sequence)]}: {error!r}"
    return found


def play_all(store: ClockedRedisStore) -> None:
    """Play many sequences.

    Raises:
        AssertionError: the stores differ; it names the steps without which they do not.
    """
    run = secrets.token_hex(4) if SEQUENCES else "always"
    for number in range(SEQUENCES or 1000):
        setup, sequence = random_sequence(f"{run} {number}")
        if not difference_in(store, setup, sequence):
            continue
        for step in list(sequence):
            shorter = [one for one in sequence if one is not step]
            sequence = shorter if difference_in(store, setup, shorter) else sequence
        raise AssertionError(f"{run} {number}: {setup}\n{difference_in(store, setup, sequence)}")


@pytest.mark.timeout(300 + SEQUENCES)
def test_stores_answer_alike(on_redis: Callable[..., ClockedRedisStore]) -> None:
    """To each call of a random sequence both stores give the same answer: status, holder, fence, slot, line and times."""
    play_all(on_redis())


@pytest.mark.parametrize("seed", ["3f5ebb3e 29388"])
def test_sequence_that_showed_a_difference(on_redis: Callable[..., ClockedRedisStore], seed: str) -> None:
    """The stores answer alike to sequences to which they once did not."""
    assert not difference_in(on_redis(), *random_sequence(seed))


def test_clock(on_redis: Callable[..., ClockedRedisStore], client: Any) -> None:
    """Commands answer as on a server without it; a key exists until its time is over, and as long as it has members."""
    store, key = on_redis(), f"clock:{secrets.token_hex(8)}"
    commands = [
        *(
            f"PTTL {key}",
            f"PEXPIRE {key} 500000",
            f"SET {key} a",
            f"PTTL {key}",
            f"SET {key} a PX 500000",
            f"GET {key}",
        ),
        *(f"SET {key} b", f"PTTL {key}", f"PEXPIRE {key} 0", f"EXISTS {key}", f"PTTL {key}", f"ZADD {key} 1 a"),
        *(f"PEXPIRE {key} 500000", f"ZREM {key} a", f"ZADD {key} 1 b", f"PTTL {key}", f"DEL {key} {key}"),
        *(f"HSET {key} a 1", f"PEXPIRE {key} -1", f"HGET {key} a"),
    ]
    for command in commands:
        words = command.replace(key, f"{key}:server").split()
        # redis-py would change the answers of its own methods.
        expected = client.eval("return redis.call(unpack(ARGV))", 0, *words)
        answer = store.command(*command.split())
        assert expected == (pytest.approx(answer, abs=50_000) if command.startswith("PTTL") else answer), command
    store.command("SET", key, "a", "PX", "1000")
    store.set_time(BEGINNING + 1)
    assert [["1001", "0"], 0, "a"] == [store.command(*words) for words in (["TIME"], ["PTTL", key], ["GET", key])]
    store.set_time(BEGINNING + 1.001)
    assert [["1001", "1000"], None] == [store.command(*words) for words in (["TIME"], ["GET", key])]
    for wrong in (["PEXPIRE", key, "1.5"], ["EXPIRE", key, "1"]):
        with pytest.raises(StoreError):
            store.command(*wrong)


def endless_reservation(store: MemoryStore, line: Line, lock: str, ttl: float) -> str:
    return NAME_NEXT(store, line, lock, 10 * ttl)


def copies_not_dropped(line: Line, ticket: str, by: str = "") -> None:
    line.remove(ticket)


def latest_in_front(line: Line, ticket: str = "", replace: str = "") -> str:
    return HEAD(line, ticket, replace) and list(line.waiting)[-1]


NAME_NEXT, HEAD = MemoryStore._name_next, Line.head


@pytest.mark.harness
@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (MemoryStore, "_name_next", endless_reservation),
        (Line, "use", copies_not_dropped),
        (Line, "head", latest_in_front),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_defect_in_memory_is_found(
    on_redis: Callable[..., ClockedRedisStore], place: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store in memory is broken, they answer differently."""
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        play_all(on_redis())


@pytest.mark.harness
@pytest.mark.parametrize(
    ("intact", "broken"),
    [
        ("if holder[1] ~= ARGV[1] then -- another's", "if not holder[1] then -- another's"),
        ("'named', 'redelivered', 'stop')", "'named', 'stop')"),
        ("is_turn = rank < free", "is_turn = rank <= free"),
        ("redis.call('PEXPIRE', KEYS[1], ARGV[2])", "redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])"),
        ("redis.call('HINCRBY', stats, 'released:' .. outcome, '1')", ""),
    ],
    ids=["owner not checked", "redelivered for ever", "one too many", "expires late", "not counted"],
)
def test_a_defect_on_redis_is_found(on_redis: Callable[..., ClockedRedisStore], intact: str, broken: str) -> None:
    """If a script is broken, they answer differently, or the records do not balance."""
    altered = []

    def alter(script: str) -> str:
        altered.append(intact in script)
        return script.replace(intact, broken)

    with pytest.raises(AssertionError):
        play_all(on_redis(alter=alter))
    assert any(altered)
