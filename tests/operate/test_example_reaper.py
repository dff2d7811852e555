"""When the demo kills its worker, and what it observes of the dead worker's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from redis import Redis
from redis.connection import Connection

from tests.servers import RedisServer, until

#: Seconds since the demo's start: of the look for a victim, and of the start of the import that makes a worker one.
NOW, STARTED = 10.0, 8.0


@pytest.fixture
def redis(own_store: RedisServer) -> Iterator[Any]:
    """Yield a client of a server from which no other client reads messages."""
    with Redis.from_url(own_store.url(), decode_responses=True) as client:
        yield client
        client.flushall()


@pytest.fixture
def workers(redis: Any) -> Iterator[list[Connection]]:
    """Yield three connections that each wait for a message, like a worker's."""
    made = [Connection(**redis.connection_pool.connection_kwargs) for _ in range(3)]
    for connection in made:
        ask(connection)
    until(lambda: waiting(redis) == 3, "three connections that wait")
    yield made
    for connection in made:
        connection.disconnect()


def ask(connection: Connection) -> None:
    """Request the next message."""
    connection.send_command("BRPOP", "messages", 0)


def waiting(redis: Any) -> int:
    """Return the number of waiting connections, as the server counts them."""
    return int(redis.info("clients")["blocked_clients"])


class Scene:
    """A demo in which ``threads`` imports rates; it is also the fleet of its reaper, and has no processes."""

    def __init__(self, example: Callable[[str], Any], redis: Any) -> None:
        self.killed: list[str] = []
        self.said: list[str] = []
        self.shown = ""
        self.paid: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None  # just before the kill
        self._ledger, self._redis, self._start = example("ledger"), redis, monotonic() - NOW
        self._ledger.create()
        self.reaper = example("reaper").Reaper(self, redis, self._start, 0.0, self.said.append)
        self.runs("import_rates", "import rates", STARTED)

    def runs(self, task: str, work: str, at: float, fence: int = 1) -> None:
        """Start a body on ``threads``, with the lock ``work``."""
        values = (task, work, work, "id", "threads@demo", 1, fence, self._start + at)
        with self._ledger.transaction() as connection:
            connection.execute("INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", values)
        self._redis.set(work, "", px=60_000)

    def start_command(self, name: str, *words: str) -> None:
        self.shown = " ".join(words)

    def output_of(self, name: str) -> str:
        shown, self.shown = self.shown, ""
        return shown

    def kill(self, name: str) -> float:
        self.meanwhile()
        self.killed.append(name)
        return monotonic()

    def tick(self) -> float:
        """Let the reaper do its next step, and return the time in the demo just before; it looks for a victim at ``NOW``."""
        elapsed = self.time() if self.reaper.kill else NOW
        self.reaper.tick(elapsed)
        return elapsed

    def time(self) -> float:
        """Return the time in the demo."""
        return monotonic() - self._start


@pytest.fixture
def scene(
    example: Callable[[str], Any],
    redis: Any,
    workers: list[Connection],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Scene:
    monkeypatch.setenv("EXAMPLE_LEDGER", str(tmp_path / "ledger.sqlite3"))
    made = Scene(example, redis)
    monkeypatch.setattr(example("tasks"), "pay", lambda account, cents: made.paid.append(account))
    return made


def test_no_kill_while_a_worker_has_a_message_unread(scene: Scene, redis: Any, workers: list[Connection]) -> None:
    """The reaper does not kill a worker that has an unread message; it kills it after the message was read."""
    redis.lpush("messages", "a message")
    until(lambda: waiting(redis) == 2, "the message on its way")
    scene.tick()
    assert [] == scene.killed

    taker = until(lambda: next((one for one in workers if one.can_read(timeout=0)), None), "it is there")
    taker.read_response()
    ask(taker)
    until(lambda: waiting(redis) == 3, "three connections that wait")
    scene.tick()
    assert ["threads"] == scene.killed


def test_each_sync_that_was_cut_is_asked_for_again(scene: Scene) -> None:
    """The reaper requests each interrupted sync again, including one that began during the kill."""
    scene.meanwhile = lambda: scene.runs("sync_account", "sync acme", NOW)
    scene.tick()
    assert ["acme"] == scene.paid


def test_key_that_expires(scene: Scene, redis: Any) -> None:
    """A key counts as gone from its expiry, however late the demo polls and whoever holds it then."""
    scene.runs("sync_account", "sync acme", NOW - 1)
    before = scene.time()
    redis.pexpire("import rates", 8000)
    redis.pexpire("sync acme", 8000)
    after = scene.time()
    scene.tick()
    asked = scene.time() - after  # at most so long before its expiry was told, the reaper looked at its clock
    until(lambda: not redis.exists("import rates", "sync acme"), "both have expired")
    redis.set("sync acme", "of another", px=60_000)
    scene.tick()
    kill = scene.reaper.kill
    assert {"import rates", "sync acme"} == set(kill.gone)
    assert all(before + 8.0 - asked - 0.01 < at < after + 8.0 + 0.01 for at in kill.gone.values())
    assert [] == kill.renewed


def test_key_that_is_renewed(scene: Scene, redis: Any) -> None:
    """A key that outlives its expiry is reported as renewed after the kill."""
    scene.tick()
    sleep(0.1)
    scene.tick()
    assert {} == scene.reaper.kill.gone
    redis.pexpire("import rates", 120_000)
    scene.tick()
    assert ["import rates"] == scene.reaper.kill.renewed


def test_key_that_is_freed(scene: Scene, redis: Any) -> None:
    """A key that disappears before its expiry counts as gone from when the demo sees it."""
    scene.tick()
    redis.delete("import rates")
    sleep(0.1)
    seen = scene.tick()
    assert seen <= scene.reaper.kill.gone["import rates"] <= scene.time()


def test_list_of_locks(scene: Scene) -> None:
    """What `celery singleton list` prints after the kill is shown once."""
    for _ in range(3):
        scene.tick()
    assert 1 == sum(line.endswith("\nsingleton list") for line in scene.said)


@pytest.mark.parametrize("fence", [2, 1])
def test_late_write(scene: Scene, example: Callable[[str], Any], fence: int) -> None:
    """A write of the dead body is tried once another body has written, and one that is not refused is reported."""
    ledger = example("ledger")
    scene.runs("sync_account", "sync acme", NOW - 1)
    scene.tick()
    ledger.post_payment(ledger.add_payment("acme", 1), "acme", 1, fence)
    ledger.add_payment("acme", 2)
    scene.runs("sync_account", "sync acme", NOW + 1, fence=2)
    with ledger.transaction() as connection:
        connection.execute("UPDATE runs SET ended = started WHERE fence = 2")
    scene.tick()
    assert ("" if fence == 2 else "sync acme") == scene.reaper.kill.late_write
    assert (fence == 2) == any("is refused" in line for line in scene.said)
