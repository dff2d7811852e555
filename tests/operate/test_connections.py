"""However often operators use the commands, the functions and the pages, the connections of a process stay few."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_singleton_lock import SingletonTask, locks
from celery_singleton_lock.cli import singleton, watch
from celery_singleton_lock.context import context_of
from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.locks import releasing
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.requests import LeaseSpec
from tests.connections import Connections
from tests.operate.django_project import WITH_ADMIN, DjangoProject
from tests.servers import RedisServer

pytestmark = pytest.mark.long
TIMES = 1000
BASE = "singleton:{shop.sync}"


def sync() -> None:
    """The body of the task."""


class Shop:
    """An app with one task, a store of its own, and the count of its connections."""

    def __init__(self, server: RedisServer) -> None:
        self.app = Celery("shop", broker=server.url(1), set_as_current=False)
        self.app.conf.singleton_lock_url = server.url()
        self.task: Any = self.app.task(base=SingletonTask, name="shop.sync")(sync)
        context_of(self.app).store.records().add_tasks("singleton:tasks", {"shop.sync": "shop.sync"})
        self.connections = Connections(server)  # the one that is there already does not count among the files

    def reserve(self, digest: str = "") -> str:
        """Acquire a lock as a message does that no worker has started; return its key. No worker is asked about it."""
        return self._acquire(digest, queued_token("waits"), queued=True)

    def run(self) -> str:
        """Acquire a lock as a body of a node that does not answer; return its key."""
        return self._acquire("", secrets.token_hex(16))

    def _acquire(self, digest: str, token: str, **more: Any) -> str:
        digest = digest or secrets.token_hex(16)
        spec = LeaseSpec(BASE, digest, token, 600.0, "waits", "w@h", 1, **more)
        assert AcquireStatus.GRANTED is context_of(self.app).store.acquire(spec).status
        return spec.lock

    def command(self, *words: str) -> Result:
        """Run a command of `celery singleton`."""
        return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=self.app))


@pytest.fixture
def shop() -> Iterator[Shop]:
    with RedisServer() as server:
        found = Shop(server)
        yield found
        found.connections.close()
        found.app.close()


KEY = f"{BASE}:lock:{'0' * 32}"
FUNCTIONS: dict[str, Callable[[Shop], Any]] = {
    "find": lambda shop: locks.find(shop.app),
    "tasks": lambda shop: locks.tasks(shop.app),
    "show": lambda shop: locks.show(shop.app, KEY),
    "stats": lambda shop: locks.stats(shop.app),
    "history": lambda shop: locks.history(shop.app, "shop.sync"),
    "check": lambda shop: locks.check(shop.app, max_age=1),
    "server": lambda shop: locks.server(shop.app),
    "release": lambda shop: locks.release(shop.app, shop.reserve()),
    "release_all": lambda shop: (shop.reserve(), locks.release_all(shop.app, "shop.sync")),
    "pause": lambda shop: locks.pause(shop.app, 60, KEY),
    "resume": lambda shop: locks.resume(shop.app, KEY),
    "lock_holder": lambda shop: shop.task.lock_holder(),
    "force_unlock": lambda shop: shop.task.force_unlock(),
    "scrape": lambda shop: LockCollector(shop.app).collect(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(shop: Shop, name: str) -> None:
    """A thousand calls of a function, one after the other, need one connection."""
    for _ in range(TIMES):
        FUNCTIONS[name](shop)
    shop.connections.check(1)


def test_workers_are_asked(shop: Shop) -> None:
    """Releases whose worker is asked, each of which takes Kombu a second, leave not one connection to the broker each.

    Kombu keeps some for the next one.
    """
    key = shop.run()
    for _ in range(20):
        assert "silent" == locks.release(shop.app, key, timeout=0.001).answer
    shop.connections.check(5, 8)


COMMANDS = {
    "list": ("list",),
    "show": ("show", KEY),
    "stats": ("stats",),
    "history": ("history", "shop.sync"),
    "check": ("check", "--max-age", "1h"),
    "release": ("release", KEY),
    "release_all": ("release", "--task", "shop.sync"),
    "pause": ("pause", KEY, "--for", "1m"),
    "resume": ("resume", KEY),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(shop: Shop, name: str) -> None:
    """A thousand runs of a command in one process need one connection."""
    for _ in range(TIMES):
        if name.startswith("release"):
            shop.reserve("0" * 32)
        done = shop.command(*COMMANDS[name])
        assert done.exit_code in (0, 1), done.output
    shop.connections.check(1)


def test_watch(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand looks of `watch` need one connection."""
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == TIMES:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", pause)
    assert 0 == shop.command("watch").exit_code
    shop.connections.check(1)


def test_thousand_locks_at_once(shop: Shop) -> None:
    """A release of a thousand locks makes no connection for each of them: the server has seen a few in all."""
    for _ in range(TIMES):
        shop.reserve()
    before = int(locks.server(shop.app)["total_connections_received"])
    done = shop.command("release", "--task", "shop.sync")
    assert (0, TIMES) == (done.exit_code, len(done.output.splitlines()))
    assert int(locks.server(shop.app)["total_connections_received"]) == before


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_store_that_goes_away(shop: Shop, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """A release of many locks that cannot go on has printed what it did, says how many locks it released, and exits with 3."""
    for _ in range(10):
        shop.reserve()
    run = RedisServerStops(shop, after=4)
    monkeypatch.setattr(releasing, "revoke", run.revoke)
    done = shop.command("release", "--task", "shop.sync", *(["--json"] if as_json else []))
    assert 3 == done.exit_code
    assert "released 4 locks, and could not go on\n" in done.stderr
    assert "Error: the store of locks: the store could not be reached" in done.stderr
    printed = json.loads(done.stdout) if as_json else done.stdout.splitlines()
    assert 4 == len(printed)


class RedisServerStops:
    """Revokes locks, and has the store shut down after some."""

    def __init__(self, shop: Shop, after: int) -> None:
        self._shop, self._left, self._revoke = shop, after, releasing.revoke

    def revoke(self, *args: Any) -> Any:
        if not self._left:
            self._shop.connections.shut_down()
        self._left -= 1
        return self._revoke(*args)


VISIT = """
import json, os
from django.conf import settings
settings.ALLOWED_HOSTS = ["*"]
settings.DEBUG = False
from django.contrib.auth.models import User
from django.test import Client
from redis import Redis
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.requests import LeaseSpec
from shop.celery import app

client = Client()
client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
store, key = context_of(app).store, "singleton:{shop.sync}:lock:" + "0" * 32
store.records().add_tasks("singleton:tasks", {"shop.sync": "shop.sync"})
page = "/admin/celery_singleton_lock/lock/"
VISITS = {
    "list": lambda: client.get(page),
    "statistics": lambda: client.get(page + "statistics/", {"task": "shop.sync"}),
    "release": lambda: client.post(page + "release/", {"key": key, "verb": "release"}),
    "resume": lambda: client.post(page + "release/", {"resume": key, "verb": "resume"}),
}
visit, statuses = VISITS[os.environ["VISIT"]], set()
visit()
files = len(os.listdir("/proc/self/fd"))
for number in range(300):
    if os.environ["VISIT"] == "release":
        token = queued_token("waits")
        store.acquire(LeaseSpec("singleton:{shop.sync}", "0" * 32, token, 60.0, "waits", queued=True))
    statuses.add(visit().status_code)
looker = Redis.from_url(settings.CELERY_SINGLETON_LOCK_URL)
more = len(os.listdir("/proc/self/fd")) - files
print(json.dumps([sorted(statuses), len(looker.client_list(_type="normal")) - 1, more]))
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("visit", "status"), [("list", 200), ("statistics", 200), ("release", 302), ("resume", 302)])
def test_pages_of_the_admin(tmp_path: Path, visit: str, status: int) -> None:
    """Hundreds of visits of a page of Django's admin need one connection."""
    pytest.importorskip("django")
    project = DjangoProject(tmp_path, WITH_ADMIN)
    with RedisServer() as redis:
        urls = f'CELERY_BROKER_URL = "{redis.url(1)}"\nCELERY_SINGLETON_LOCK_URL = "{redis.url()}"'
        project.write({"shop/settings.py": urls})
        assert 0 == project.manage("migrate").returncode
        command = [sys.executable, "-m", "django", "shell", "-c", VISIT]
        env = {**project.env, "VISIT": visit}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert 0 == done.returncode, done.stderr
        assert [[status], 1, 0] == json.loads(done.stdout.splitlines()[-1])
