"""A lock whose worker cannot be asked, as the broker is away: the worker is not blamed for that."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_singleton_lock import locks
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.context import context_of
from celery_singleton_lock.locks import releasing
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.requests import LeaseSpec
from tests.servers import RedisServer, free_port

pytestmark = pytest.mark.long
BASE = "singleton:{shop.sync}"
SAID = "the broker could not be reached, so w1@host was not asked"


@pytest.fixture(params=["down", "hung"])
def broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the URL of a broker that refuses connections, or accepts them and never answers."""
    if request.param == "down":
        yield f"redis://127.0.0.1:{free_port()}/0"
        return
    with RedisServer() as server:
        server.pause()
        yield server.url()


@pytest.fixture
def app(own_store: RedisServer, broker: str) -> Iterator[Celery]:
    """Yield an app without a broker, in whose store a body has a lock, and a message a reservation."""
    changes = {"singleton_lock_url": own_store.url()}
    app = Celery("away", broker=broker, set_as_current=False, changes=changes)
    store = context_of(app).store
    store.records().add_tasks("singleton:tasks", {"shop.sync": "shop.sync"})
    for digit, token in (("a", secrets.token_hex(8)), ("b", queued_token("b"))):
        is_queued = digit == "b"
        store.acquire(LeaseSpec(BASE, digit * 32, token, 60.0, digit, "w1@host", 4711, queued=is_queued))
    yield app
    for lock in locks.find(app):
        locks.release(app, lock.key, force=True)
    app.close()


def command(app: Celery, *words: str) -> Result:
    return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=app))


def test_python(app: Celery) -> None:
    """The answer is one of its own, and the lock stays; one that needs no answer is released."""
    one = locks.release(app, f"{BASE}:lock:{'a' * 32}")
    assert ("refused", releasing.UNREACHABLE, False) == (one.outcome, one.answer, one.released)
    both = locks.release_all(app, "shop.sync")
    assert {"a": ("refused", "unreachable"), "b": ("released", "")} == {
        done.holder.task_id: (done.outcome, done.answer) for done in both if done.holder
    }
    assert ["a"] == [lock.holder.task_id for lock in locks.find(app)]


@pytest.mark.parametrize("words", [(f"{BASE}:lock:{'a' * 32}",), ("--node", "w1@host")])
def test_command(app: Celery, words: Sequence[str]) -> None:
    """The command says that it is the broker, in words and as JSON; with --force it releases the lock."""
    done = command(app, "release", *words)
    assert (1, True) == (done.exit_code, f"refused: {SAID}; held by task a on w1@host " in done.output), done.output
    assert "did not answer" not in done.output
    told = json.loads(command(app, "release", *words, "--json").stdout)
    assert "unreachable" == (told if isinstance(told, dict) else told[0])["answer"]
    assert f"released: {SAID}; " in command(app, "release", *words, "--force").output
