"""The helpers for users' own tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.memory import MemoryStore
from celery_singleton_lock.testing import assert_free, assert_held, locked, memory_store
from tests.servers import until
from tests.unit.conftest import MakeApp


def sync_account(account: int) -> str:
    return f"synced {account}"


def redis_app(make_app: MakeApp, **settings: Any) -> Any:
    """Make an app as a user has it, configured for a Redis server that does not run."""
    app = make_app(singleton_lock_url="redis://127.0.0.1:1/0", **settings)
    app.task(base=SingletonTask, name="sync")(sync_account)
    return app


def test_duplicate_without_redis(make_app: MakeApp) -> None:
    """An eager run is a duplicate while its lock is held, and runs with another lock key or afterwards."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app):
        with locked(sync, 42) as holder:
            assert sync.apply((42,)).result is None
            assert "synced 43" == sync.apply((43,)).result
            assert holder.task_id == assert_held(sync, 42).task_id
            with pytest.raises(AssertionError, match="held"):
                assert_free(sync, 42)
        assert_free(sync, 42)
        assert "synced 42" == sync.apply((42,)).result
        with pytest.raises(AssertionError, match="free"):
            assert_held(sync, 42)


def test_locking_twice_is_an_error(make_app: MakeApp) -> None:
    """A held lock cannot be held again; the error names key and holder."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with (
        memory_store(app),
        locked(sync, 42),
        pytest.raises(AssertionError, match="held-by-test"),
        locked(sync, account=42),
    ):
        pass


def test_store_is_empty_at_first(make_app: MakeApp) -> None:
    """Each use starts without locks, whatever was held before."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app):
        left = locked(sync, 42)
        left.__enter__()
    with memory_store(app):
        assert_free(sync, 42)


def test_settings_are_restored(make_app: MakeApp) -> None:
    """After the block the app has its own settings again, and those that it did not set are unset."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    key = sync.lock_key_for(42)
    with memory_store(app):
        sync.apply((42,))
    assert key == sync.lock_key_for(42)
    assert "redis://127.0.0.1:1/0" == app.conf.singleton_lock_url
    assert not app.conf.get("singleton_lock_eager", False)
    assert "synced 42" == sync.apply((42,)).result


def test_settings_are_restored_after_a_failure(make_app: MakeApp) -> None:
    """The settings are restored if the block fails, too."""
    app = redis_app(make_app)
    with pytest.raises(ZeroDivisionError), memory_store(app):
        raise ZeroDivisionError
    assert app.tasks["sync"].lock_key_for(42)
    assert "redis://127.0.0.1:1/0" == app.conf.singleton_lock_url


def test_keys_are_the_same_inside(make_app: MakeApp) -> None:
    """Keys are the same inside and outside of the block, with the app's prefix."""
    app = redis_app(make_app, singleton_lock_prefix="shop")
    sync = app.tasks["sync"]
    key = sync.lock_key_for(42)
    with memory_store(app):
        assert key == sync.lock_key_for(42)
        with locked(sync, 42):
            assert sync.lock_holder(42)


def test_an_app_without_any_store(make_app: MakeApp) -> None:
    """An app without a store can be tested, and afterwards its error about the missing store is the same."""
    app = make_app(singleton_lock_url=None)
    sync = app.task(base=SingletonTask, name="sync")(sync_account)
    with memory_store(app):
        assert "synced 1" == sync.apply((1,)).result
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        sync.lock_key_for(1)


def test_nested_use(make_app: MakeApp) -> None:
    """An inner block has its own store; after it the locks of the outer block are held again."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app), locked(sync, 42):
        with memory_store(app):
            assert_free(sync, 42)
        assert_held(sync, 42)


def test_policies_can_be_tested(make_app: MakeApp) -> None:
    """The task's own policy decides what happens to the duplicate."""
    app = redis_app(make_app)
    loud = app.task(base=SingletonTask, name="loud", on_duplicate="raise")(sync_account)
    with memory_store(app), locked(loud, 1):
        assert "DuplicateTask" == type(loud.apply((1,)).result).__name__


# -- threads and stores after a use --------------------------------------------------------------------


def native_threads() -> set[str]:
    """Return the ids of this process's threads, those unknown to `threading` included."""
    return set(os.listdir("/proc/self/task"))


def memory_stores() -> int:
    gc.collect()
    return sum(type(one) is MemoryStore for one in gc.get_objects())


def test_nothing_is_left_behind(make_app: MakeApp) -> None:
    """After many uses no thread and no store is left; each use had both of its threads."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    threads, stores = native_threads(), memory_stores()
    for _ in range(50):
        with memory_store(app):
            assert "synced 42" == sync.apply((42,)).result
            context_of(app).callbacks.call(bool)
            assert 2 <= len(native_threads() - threads)
        until(lambda: not native_threads() - threads, "its threads have ended")
    assert stores == memory_stores()


def test_nested_use_ends_only_its_own(make_app: MakeApp) -> None:
    """After an inner block has ended, the outer one still renews leases and calls callbacks."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    threads = native_threads()
    with memory_store(app):
        with memory_store(app):
            sync.apply((42,))
        sync.apply((42,))
        called: list[int] = []
        context_of(app).callbacks.call(lambda: called.append(1))
        until(lambda: called)
    until(lambda: not native_threads() - threads, "the threads of both have ended")


GREEN = """
import {library}
{patch}
import os, time
from celery import Celery
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.context import context_of
from celery_singleton_lock.testing import memory_store

app = Celery("green", broker="memory://", backend="cache+memory://")

@app.task(base=SingletonTask)
def work():
    return 1

def counted():
    return sum(len(os.listdir("/proc/self/" + kind)) for kind in ("task", "fd"))

def use():
    with memory_store(app):
        assert work.apply().result == 1
        called = []
        context_of(app).callbacks.call(lambda: called.append(1))
        while not called:
            time.sleep(0.001)

use()
before = counted()
for _ in range(20):
    use()
deadline = time.monotonic() + 60
while not (over := counted() <= before) and time.monotonic() < deadline:
    time.sleep(0.01)
print(over, counted(), before)
"""


@pytest.mark.parametrize(
    ("library", "patch"),
    [
        ("gevent.monkey", "gevent.monkey.patch_all()"),
        ("eventlet", "eventlet.monkey_patch()"),
    ],
)
def test_nothing_is_left_behind_in_green_processes(library: str, patch: str) -> None:
    """In a process patched by gevent or eventlet no thread and no file descriptor is left."""
    code = GREEN.format(library=library, patch=patch)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert ended.stdout.startswith("True"), ended.stdout + ended.stderr


class TestInFixtures:
    """Several fixtures of one test can each use a store."""

    @pytest.fixture
    def outer(self, make_app: MakeApp) -> Iterator[Any]:
        app = redis_app(make_app)
        with memory_store(app), locked(app.tasks["sync"], 1):
            yield app
            assert_held(app.tasks["sync"], 1)

    @pytest.fixture
    def inner(self, outer: Any) -> Iterator[Any]:
        with memory_store(outer), locked(outer.tasks["sync"], 2):
            yield outer
            assert_free(outer.tasks["sync"], 1)

    @pytest.mark.parametrize("number", range(3))
    def test_use(self, outer: Any, inner: Any, number: int) -> None:
        sync = inner.tasks["sync"]
        assert_free(sync, 1)
        assert sync.apply((2,)).result is None
        with memory_store(inner):
            assert "synced 2" == sync.apply((2,)).result


# -- tasks that use no lock ---------------------------------------------------------------------


def plain_task(app: Any) -> Any:
    return app.task(name="plain")(sync_account)


def switched_off(app: Any) -> Any:
    return app.task(base=SingletonTask, name="off", singleton=False)(sync_account)


def switched_off_below(app: Any) -> Any:
    class Locked(SingletonTask):
        name = "locked"

        def run(self, account: int) -> None: ...

    app.register_task(Locked())
    return app.register_task(type("Off", (Locked,), {"name": "off", "singleton": False})())


def switched_off_by_setting(app: Any) -> Any:
    app.conf.singleton_singleton = False
    return app.task(base=SingletonTask, name="off")(sync_account)


def celerys_own(app: Any) -> Any:
    return app.task(base=SingletonTask, name="celery.sync")(sync_account)


def bare_function(app: Any) -> Any:
    return sync_account


@pytest.mark.parametrize(
    "make", [plain_task, switched_off, switched_off_below, switched_off_by_setting, celerys_own, bare_function]
)
def test_task_without_a_lock_is_refused(make_app: MakeApp, make: Callable[[Any], Any]) -> None:
    """`locked` and the assertions refuse a task that uses no lock; the error names it and says why."""
    app = redis_app(make_app)
    task = make(app)
    name = getattr(task, "name", "sync_account")
    with memory_store(app):
        with pytest.raises(TypeError, match=f"{name}.* no lock"), locked(task, 42):
            pass
        with pytest.raises(TypeError, match=f"{name}.* no lock"):
            assert_held(task, 42)
        with pytest.raises(TypeError, match=f"{name}.* no lock"):
            assert_free(task, 42)
