"""Operators' pauses: who set them, why and since when; shown first by each command; and counted apart from `lock_at_least`."""

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
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec
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


def acquire(app: Celery, digit: str = "a") -> LeaseSpec:
    spec = LeaseSpec(BASE, digit * 32, secrets.token_hex(8), 600.0, f"task-{digit}", "w1@host", 4711)
    context_of(app).store.acquire(spec)
    return spec


def test_author_reason_and_since(app: Celery) -> None:
    """A pause tells who has set it, why and when; without a name, the user and the host of the process that did."""
    done = command(app, "pause", "--task", TASK, "--for", "2h", "--by", "ann", "--reason", "move of the\ndatabase")
    assert (0, True) == (done.exit_code, done.output.startswith(f"{TASK} is paused for 2h, until ")), done.output
    (lock,) = locks.find(app)
    assert ("ann", "move of the\ndatabase") == (lock.holder.by, lock.holder.reason)
    assert (True, True) == (0 <= lock.holder.age < 60, abs(time.time() - lock.since) < 60)
    (as_json,) = json.loads(command(app, "list", "--json").output)
    assert ("ann", "move of the\ndatabase") == (as_json["holder"]["by"], as_json["holder"]["reason"])
    shown = command(app, "show", f"{BASE}:lock:*").output
    assert shown.startswith("held by an operator's pause (by ann, move of the\\ndatabase, for "), shown
    told = json.loads(command(app, "pause", "--task", TASK, "--for", "1h", "--json").output)
    (lock,) = locks.find(app)
    assert ("", told["by"]) == (lock.holder.reason, lock.holder.by)
    assert "@" in lock.holder.by
    assert locks.resume(app, task=TASK)
    assert [] == context_of(app).store.command("HGETALL", f"{BASE}:pauses")  # type: ignore[attr-defined]


def test_longest_reason(app: Celery) -> None:
    """A reason that is too long, or has a character that separates fields, is refused in words."""
    for reason in ("x" * 201, "a\x1fb"):
        done = command(app, "pause", "--task", TASK, "--for", "2h", "--reason", reason)
        assert (3, True) == (done.exit_code, "the reason of a pause" in done.output), done.output
    assert [] == locks.find(app)


@pytest.mark.parametrize("words", [("list",), ("list", "--min-age", "1h"), ("list", "--sort", "ttl")])
def test_shown_first(app: Celery, words: tuple[str, ...]) -> None:
    """A pause is the first row, whatever the order and the minimum age are."""
    acquire(app)
    locks.pause(app, 60, task=TASK, reason="a move", by="ann@web")
    head, first, *_ = command(app, *words).output.splitlines()
    assert head.split()[:4] == ["TASK", "STATE", "AGE", "TTL"]
    assert (TASK, "paused", f"{BASE}:lock:*") == (*first.split()[:2], first.split()[-1])
    assert "ann@web: a move" in first


def test_duplicate_is_told(app: Celery) -> None:
    """Whoever meets a pause is told its author, its reason and its age."""

    @app.task(base=SingletonTask, name=TASK, on_duplicate="raise")  # type: ignore[untyped-decorator]
    def sync() -> None: ...

    locks.pause(app, 60, task=TASK, reason="a move", by="ann@web")
    locks.pause(app, 30, key=sync.lock_key_for(), reason="another", by="bob@web")
    with pytest.raises(DuplicateTask) as told:
        sync.apply(throw=True)
    assert ("ann@web", "a move") == (told.value.holder.by, told.value.holder.reason)
    assert 0 < told.value.holder.age < 30 < told.value.holder.remaining
    locks.pause(app, 90, key=sync.lock_key_for(), reason="another", by="bob@web")
    with pytest.raises(DuplicateTask, match="by bob@web, another, for "):
        sync.apply(throw=True)


def test_counted_apart(app: Celery, server: RedisServer) -> None:
    """The exporter counts operators' pauses, and tells when the oldest was set; a cooldown of `lock_at_least` is none."""
    spec = acquire(app, "b")
    context_of(app).store.release(spec, True, kept=AfterRelease("cooldown", 60.0))
    with exporter(server.url()) as (_, url):
        one = scrape(url)
        assert (1, 0, 0) == numbers(one)
        locks.pause(app, 60, task=TASK, by="ann")
        locks.pause(app, 60, key=spec.lock, by="ann")
        cooldowns, pauses, since = numbers(scrape(url))
    assert (1, 2) == (cooldowns, pauses)
    assert time.time() - 60 < since <= time.time() + 1
    (statistics,) = locks.stats(app)
    assert {"cooldown": 1, "paused": 2} == statistics.states


def numbers(output: Any) -> tuple[float, float, float]:
    counts = {
        one.labels["state"]: one.value
        for one in output.samples
        if {"task": TASK}.items() < one.labels.items() and "state" in one.labels
    }
    return counts["cooldown"], counts["paused"], output.sum("oldest_pause_start_timestamp_seconds", TASK)


def test_text() -> None:
    """The text of a pause leaves out what is not known."""
    assert "an operator's pause (expires in 5.0s)" == str(Holder(remaining=5, state="paused"))
    known = Holder(age=60.0, remaining=5.0, state="paused", by="ann", reason="a move")
    assert "an operator's pause (by ann, a move, for 1m, expires in 5.0s)" == str(known)
