"""What the commands show is what is so: names of any kind are found, typos are told, and no foreign text steers the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_singleton_lock import SingletonTask, locks
from celery_singleton_lock.cli import output, singleton
from celery_singleton_lock.context import context_of
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.records import RunRecord
from celery_singleton_lock.store.redis.records import RedisRecords
from celery_singleton_lock.store.requests import LeaseSpec
from tests.operate.test_exporter import APP, environment
from tests.servers import RedisServer

TASK = "shop.sync"
BASE = f"singleton:{{{TASK}}}"
EVIL = "a\x1b[2J\nb"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as found:
        yield found


@pytest.fixture
def app(server: RedisServer) -> Iterator[Celery]:
    changes = {"singleton_lock_url": server.url(), "singleton_lock_history": 3}
    app = Celery("screens", broker="memory://", set_as_current=False, changes=changes)
    store: Any = context_of(app).store
    store.command("FLUSHALL")
    store.records().add_tasks("singleton:tasks", {TASK: TASK, "shop.idle": "shop.idle", "shop.bill": "customers"})
    yield app
    app.close()


def command(app: Celery, *words: str) -> Result:
    return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=app))


def acquire(app: Celery, digit: str = "a", task_id: str = "", node: str = "w1@host", **more: Any) -> LeaseSpec:
    spec = LeaseSpec(BASE, digit * 32, secrets.token_hex(8), 600.0, task_id or f"task-{digit}", node, 4711, **more)
    context_of(app).store.acquire(spec)
    return spec


# -- names ---------------------------------------------------------------------------------------


def publisher(app: Celery, name: str, **options: Any) -> Any:
    """Return a task that is locked at its publish, of which no worker knows."""

    def body(number: int) -> int:
        return number

    return app.task(body, name=name, base=SingletonTask, lock_from="publish", shared=False, **options)


def names(app: Celery) -> dict[str, str]:
    """Return the names of tasks that the store knows, with those of their locks."""
    return dict(context_of(app).store.records().tasks("singleton:tasks"))


def test_reservation_of_a_task_that_no_worker_has(app: Celery) -> None:
    """`list`, `show`, `stats` and the rest find the lock of a message whose task only its publisher knows."""
    task, member = publisher(app, "shop.mail"), publisher(app, "shop.fax", lock_group="letters", unique_on=["number"])
    found = {task.delay(1).id: "shop.mail", member.delay(1).id: "letters"}
    assert found == {lock.holder.task_id: lock.task for lock in locks.find(app)}
    assert {*found.values()} <= {*locks.tasks(app)} & {one.task for one in locks.stats(app)}
    assert "letters" == names(app)["shop.fax"]
    for task_id in found:
        assert [task_id] == [lock.holder.task_id for lock in locks.show(app, task_id)]
        assert task_id in command(app, "list").output


def test_a_name_is_registered_once_a_minute(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher costs the store one more call a minute for each task, also if that call fails; and none without a lock."""
    task, calls, time = publisher(app, "shop.mail"), Counter[str](), [1000.0]
    monkeypatch.setattr("celery_singleton_lock.context.now", lambda: time[0])
    monkeypatch.setattr(RedisRecords, "add_tasks", lambda records, key, tasks: calls.update([*tasks]))
    for number in range(10):
        task.delay(number)
    assert {"shop.mail": 1} == calls
    publisher(app, "shop.fax").delay(1)
    time[0] += 61.0
    assert task.delay(1).duplicate
    assert {"shop.mail": 1, "shop.fax": 1} == calls
    task.delay(11)
    assert {"shop.mail": 2, "shop.fax": 1} == calls


def test_a_name_that_cannot_be_registered(app: Celery) -> None:
    """A store that refuses the name does not keep the message from being published with its lock."""
    task, store = publisher(app, "shop.mail"), context_of(app).store
    store.command("SET", "singleton:tasks", "no hash")  # type: ignore[attr-defined]
    result = task.delay(1)
    assert result.id == task.lock_holder(1).task_id
    store.command("DEL", "singleton:tasks")  # type: ignore[attr-defined]
    assert [result.id] == [lock.holder.task_id for lock in locks.find(app, "shop.mail")]


# -- show ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [TASK, "a" * 32, f"lock:{'a' * 32}", "task-a"])
def test_show_by_any_name(app: Celery, name: str) -> None:
    """A task's name, the digest of a key, the end of a key and the id of a task are found, as a whole key is."""
    spec = acquire(app)
    done = command(app, "show", name)
    assert (0, True) == (done.exit_code, f"{spec.lock} is held by task task-a on w1@host " in done.output), done.output
    assert [spec.lock] == [lock.key for lock in locks.show(app, name)]


def test_show_all_that_keeps_it_from_starting(app: Celery) -> None:
    """By its digest, a lock is shown with all its slots, and with the pause of its whole task."""
    acquire(app, limit=2)
    acquire(app, task_id="second", limit=2)
    acquire(app, "b")
    locks.pause(app, 60, task=TASK)
    assert 3 == len(locks.show(app, "a" * 32))
    assert 4 == len(locks.show(app, TASK))


def test_show_what_is_free(app: Celery) -> None:
    """What nobody holds is free, if the name is known; a name that nobody knows may be a task's id."""
    for name, said in [
        ("shop.idle", "no lock of shop.idle is held\n"),
        ("c" * 32, f"no lock with the digest {'c' * 32} is held\n"),
        ("task-x", "no lock is held by a task task-x; one that waits has none yet\n"),
    ]:
        done = command(app, "show", name)
        assert (1, said) == (done.exit_code, done.output)
    grouped = command(app, "show", "shop.bill")
    assert (3, True) == (grouped.exit_code, "name 'customers' instead" in grouped.output)


# -- nothing is shown as if there were nothing -----------------------------------------------------


def test_younger_locks(app: Celery) -> None:
    """If all locks are younger than asked for, the command says so."""
    acquire(app)
    acquire(app, "b")
    assert "no locks that old; 2 younger\n" == command(app, "list", "--min-age", "1h").output
    assert "no locks\n" == command(app, "list", "--task", "shop.idle", "--min-age", "1h").output


def test_pause_is_shown(app: Celery) -> None:
    """A health check that is fine tells of a pause, and so does a release that finds no other lock."""
    locks.pause(app, 600.0, task=TASK, reason="a dump", by="ann")
    assert "SINGLETON OK - 0 locks of 3 tasks, 1 paused |" in command(app, "check").output
    none, held = command(app, "release", "--task", TASK).output.splitlines()
    assert ("no locks", True) == (none, held.startswith("but held by an operator's pause (by ann"))
    locks.resume(app, task=TASK)
    assert "SINGLETON OK - 0 locks of 3 tasks |" in command(app, "check").output
    assert "no locks\n" == command(app, "release", "--task", TASK).output


# -- history ------------------------------------------------------------------------------------


def test_history_that_has_gone_on(app: Celery) -> None:
    """If no run under a key is kept, the command says how far the history of the task reaches."""
    spec = acquire(app)
    none = command(app, "history", spec.lock)
    assert (0, "no runs that have ended\n") == (none.exit_code, none.output)
    for number in range(5):
        one = acquire(app, "bcdef"[number])
        one.record = RunRecord(outcome="success")
        context_of(app).store.release(one, True)
    done = command(app, "history", spec.lock)
    assert done.output.startswith(
        f"no runs under this key among the last 3 of {TASK}; the first of these ended at 2"
    ), done.output
    assert 2 == len(command(app, "history", one.lock).output.splitlines())


# -- names that nobody knows --------------------------------------------------------------------


@pytest.mark.parametrize("words", [("list",), ("stats",), ("release",), ("list", "--json")])
def test_unknown_task(app: Celery, words: tuple[str, ...]) -> None:
    """A name of a task that no worker has registered, and of which there is no lock, is no answer: the status is 3."""
    acquire(app)
    done = command(app, *words, "--task", "shop.snyc")
    assert (3, True) == (done.exit_code, "no worker has registered a task or lock group 'shop.snyc'" in done.output)
    assert 0 == command(app, *words, "--task", "shop.idle").exit_code
    history = command(app, "history", "shop.snyc")
    assert 3 == history.exit_code


@pytest.mark.parametrize("words", [("list",), ("release", "--dry-run")])
def test_unknown_node(app: Celery, words: tuple[str, ...]) -> None:
    """A node without locks may be a typo: the command names those with locks, and exits with 1."""
    acquire(app)
    done = command(app, *words, "--node", "w1@hots")
    assert (1, True) == (done.exit_code, "no locks on node w1@hots; nodes with locks: w1@host\n" in done.output)
    context_of(app).store.command("FLUSHALL")  # type: ignore[attr-defined]


# -- foreign texts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("show", "KEY"), ("show", TASK), ("list",), ("release", "KEY"), ("release", "--task", TASK)]
)
def test_terminal_is_not_steered(app: Celery, words: tuple[str, ...]) -> None:
    """Escapes and line ends in the id of a task, in the name of a node and in a reason are shown as text."""
    spec = acquire(app, task_id=EVIL, node=f"{EVIL}@host")
    locks.pause(app, 60, task=TASK, by=EVIL, reason=EVIL)
    done = command(app, *[spec.lock if word == "KEY" else word for word in words])
    assert "\x1b" not in done.output
    assert "a\\x1b[2J\\nb" in done.output
    assert EVIL not in f"{Holder(EVIL, EVIL, 1, 2.0, 3.0)} {Holder(state='paused', by=EVIL)}"


# -- widths and units ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_wide_characters(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """A key stays whole, and columns are in line, where the names of tasks have wide characters."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    key = f"singleton:{{{'商店' * 20}}}:lock:{'0' * 32}"
    text = output.table_text(("TASK", "STATE", "KEY"), [("商店" * 20, "running", key), ("b", "paused", "k")])
    plain = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert plain[1].endswith(key)
    assert "商店" * 20 + "  running" in plain[1]
    assert "b" + " " * 81 + "paused" in plain[2]


def test_one_unit(app: Celery) -> None:
    """Times are written in one way everywhere: `1h30m`."""
    assert "task a on n (pid 1, for 1h30m, expires in 28s)" == str(Holder("a", "n", 1, 5400.1, 28.3))
    refused = command(app, "pause", "--task", TASK, "--for", "400d")
    assert "a pause of 400d must be longer than 0, and at most 366d" in refused.output
    shown = json.loads(command(app, "list", "--json").output)
    assert [] == shown


def test_no_color(app: Celery, server: RedisServer, tmp_path: Path) -> None:
    """On a terminal, `celery --no-color` makes tables plain; without it, and with rich, they have colours."""
    pytest.importorskip("rich")
    acquire(app)
    (tmp_path / "bare.py").write_text(APP.format(store=server.url()))
    shown = {words: on_terminal(tmp_path, *words, "singleton", "list") for words in ((), ("--no-color",))}
    assert all("task-a" in text for text in shown.values()), shown
    assert (True, False) == tuple("\x1b[" in text for text in shown.values())


def on_terminal(directory: Path, *words: str) -> str:
    """Run a command of Celery whose output is a terminal; return what it wrote."""
    end, terminal = pty.openpty()
    env = {key: value for key, value in environment(directory, TERM="xterm").items() if key != "NO_COLOR"}
    line = [sys.executable, "-m", "celery", "-A", "bare", *words]
    process = subprocess.Popen(line, cwd=directory, env=env, stdout=terminal, stderr=terminal)
    os.close(terminal)
    text = b""
    with suppress(OSError):  # at its end
        while part := os.read(end, 65536):
            text += part
    os.close(end)
    assert 0 == process.wait(30), text
    return text.decode()
