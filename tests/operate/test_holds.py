"""Operators' holds: who set them, why and since when; shown first by each command; and counted apart from `lock_at_least`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_singleton_lock import DuplicateTask, SingletonTask, locks
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.context import context_of
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.protocol import Kept, LeaseRequest
from tests.operate.test_exporter import exporter, scrape
from tests.servers import RedisServer

TASK = "shop.sync"
BASE = f"singleton:{{{TASK}}}"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as found:
        yield found


@pytest.fixture
def app(server: RedisServer) -> Iterator[Celery]:
    changes = {"singleton_lock_url": server.url(), "singleton_lock_eager": True}
    app = Celery("held", broker="memory://", set_as_current=False, changes=changes)
    store: Any = context_of(app).store
    store.command("FLUSHALL")
    store.records().add_tasks("singleton:tasks", {TASK: TASK})
    yield app
    app.close()


def command(app: Celery, *words: str) -> Result:
    return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=app))


def acquire(app: Celery, digit: str = "a") -> LeaseRequest:
    wanted = LeaseRequest(BASE, digit * 32, secrets.token_hex(8), 600.0, f"task-{digit}", "w1@host", 4711)
    context_of(app).store.acquire(wanted)
    return wanted


def test_author_reason_and_since(app: Celery) -> None:
    """A hold tells who has set it, why and when; without a name, the user and the host of the process that did."""
    done = command(app, "hold", "--task", TASK, "--for", "2h", "--by", "ann", "--reason", "move of the\ndatabase")
    assert (0, True) == (done.exit_code, done.output.startswith(f"{TASK} is held for 2h, until ")), done.output
    (lock,) = locks.list(app)
    assert ("ann", "move of the\ndatabase") == (lock.holder.by, lock.holder.reason)
    assert (True, True) == (0 <= lock.holder.age < 60, abs(time.time() - lock.since) < 60)
    (as_json,) = json.loads(command(app, "list", "--json").output)
    assert ("ann", "move of the\ndatabase") == (as_json["holder"]["by"], as_json["holder"]["reason"])
    shown = command(app, "show", f"{BASE}:lock:*").output
    assert shown.startswith("held by an operator's hold (by ann, move of the\\ndatabase, for 0."), shown
    told = json.loads(command(app, "hold", "--task", TASK, "--for", "1h", "--json").output)
    (lock,) = locks.list(app)
    assert ("", told["by"]) == (lock.holder.reason, lock.holder.by)
    assert "@" in lock.holder.by
    assert locks.unhold(app, task=TASK)
    assert [] == context_of(app).store.command("HGETALL", f"{BASE}:holds")  # type: ignore[attr-defined]


def test_longest_reason(app: Celery) -> None:
    """A reason that is too long, or has a character that separates fields, is refused in words."""
    for reason in ("x" * 201, "a\x1fb"):
        done = command(app, "hold", "--task", TASK, "--for", "2h", "--reason", reason)
        assert (3, True) == (done.exit_code, "the reason of a hold" in done.output), done.output
    assert [] == locks.list(app)


@pytest.mark.parametrize("words", [("list",), ("list", "--min-age", "1h"), ("list", "--sort", "ttl")])
def test_shown_first(app: Celery, words: tuple[str, ...]) -> None:
    """A hold is the first row, whatever the order and the minimum age are."""
    acquire(app)
    locks.hold(app, 60, task=TASK, reason="a move", by="ann@web")
    head, first, *_ = command(app, *words).output.splitlines()
    assert head.split()[:4] == ["TASK", "STATE", "AGE", "TTL"]
    assert (TASK, "held", f"{BASE}:lock:*") == (*first.split()[:2], first.split()[-1])
    assert "ann@web: a move" in first


def test_duplicate_is_told(app: Celery) -> None:
    """Whoever meets a hold is told its author, its reason and its age."""

    @app.task(base=SingletonTask, name=TASK, on_duplicate="raise")  # type: ignore[untyped-decorator]
    def sync() -> None: ...

    locks.hold(app, 60, task=TASK, reason="a move", by="ann@web")
    locks.hold(app, 30, key=sync.lock_key_for(), reason="another", by="bob@web")
    with pytest.raises(DuplicateTask) as told:
        sync.apply(throw=True)
    assert ("ann@web", "a move") == (told.value.holder.by, told.value.holder.reason)
    assert 0 < told.value.holder.age < 30 < told.value.holder.remaining
    locks.hold(app, 90, key=sync.lock_key_for(), reason="another", by="bob@web")
    with pytest.raises(DuplicateTask, match="by bob@web, another, for 0"):
        sync.apply(throw=True)


def test_counted_apart(app: Celery, server: RedisServer) -> None:
    """The exporter counts operators' holds, and tells when the oldest was set; what `lock_at_least` holds is no such hold."""
    wanted = acquire(app, "b")
    context_of(app).store.release(wanted, True, kept=Kept("held", 60.0))
    with exporter(server.url()) as (_, url):
        one = scrape(url)
        assert (1, 0, 0) == numbers(one)
        locks.hold(app, 60, task=TASK, by="ann")
        locks.hold(app, 60, key=wanted.lock, by="ann")
        leases, holds, since = numbers(scrape(url))
    assert (1, 2) == (leases, holds)
    assert time.time() - 60 < since <= time.time() + 1
    (statistics,) = locks.stats(app)
    assert ({"held": 1}, 2) == (statistics.states, statistics.holds)


def numbers(output: Any) -> tuple[float, float, float]:
    names = ("operator_holds", "oldest_operator_hold_start_timestamp_seconds")
    (held,) = (one.value for one in output.samples if one.labels == {"task": TASK, "state": "held"})
    count, since = (output.sum(name, TASK) for name in names)
    return held, count, since


def test_text() -> None:
    """The text of a hold leaves out what is not known."""
    assert "an operator's hold (expires in 5.0s)" == str(Holder(remaining=5, state="held"))
    known = Holder(age=60.0, remaining=5.0, state="held", by="ann", reason="a move")
    assert "an operator's hold (by ann, a move, for 1m, expires in 5.0s)" == str(known)
