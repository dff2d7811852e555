"""When the demo kills its worker: not while a message is on its way to one and in no key of Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.connection import Connection

from tests.servers import RedisServer, until

#: Seconds since the demo's start: of the look for a victim, and of the start of the import that makes a worker one.
NOW, STARTED = 10.0, 8.0


@pytest.fixture
def redis(own_store: RedisServer) -> Iterator[Any]:
    """A client of a server that nobody else asks for messages."""
    with Redis.from_url(own_store.url(), decode_responses=True) as client:
        yield client


@pytest.fixture
def workers(redis: Any) -> Iterator[list[Connection]]:
    """Three connections that wait for a message each, as a worker's does."""
    made = [Connection(**redis.connection_pool.connection_kwargs) for _ in range(3)]
    for connection in made:
        ask(connection)
    yield made
    for connection in made:
        connection.disconnect()


def ask(connection: Connection) -> None:
    """Ask for the next message."""
    connection.send_command("BRPOP", "messages", 0)


def waiting(redis: Any) -> int:
    """How many connections wait, by the server's own count."""
    return int(redis.info("clients")["blocked_clients"])


def test_no_kill_while_a_worker_has_a_message_unread(
    example: Callable[[str], Any],
    redis: Any,
    workers: list[Connection],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A full worker leaves what Redis has given it in the socket; once it has read that and asks again, the kill comes."""
    monkeypatch.setenv("EXAMPLE_LEDGER", str(tmp_path / "ledger.sqlite3"))
    ledger, start, killed = example("ledger"), monotonic() - NOW, []
    ledger.create()
    with ledger.transaction() as connection:
        values = ("import_rates", "import rates", "key", "id", "threads@demo", 1, start + STARTED)
        connection.execute("INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, NULL)", values)
    fleet = SimpleNamespace(kill=lambda name: killed.append(name) or monotonic())
    reaper = example("reaper").Reaper(fleet, redis, start, 0.0, print)

    until(lambda: waiting(redis) == 3, "three connections that wait")
    redis.lpush("messages", "a message")
    until(lambda: waiting(redis) == 2, "the message on its way")
    reaper.tick(NOW)
    assert not killed

    taker = next(connection for connection in workers if connection.can_read(timeout=0.2))
    taker.read_response()
    ask(taker)
    until(lambda: waiting(redis) == 3, "three connections that wait")
    reaper.tick(NOW)
    assert killed == ["threads"]
