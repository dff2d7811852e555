"""What users do with apps and tasks without a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.testing import locked
from tests.servers import RedisServer


@pytest.fixture
def make_app(redis_server: RedisServer) -> Iterator[Callable[..., Celery]]:
    """Makes eager apps with locks in a database each."""
    apps: list[Celery] = []

    def make(**conf: Any) -> Celery:
        app = Celery(f"app{len(apps)}", set_as_current=False)
        app.conf.update(task_always_eager=True, singleton_lock_url=redis_server.url(db=4 + len(apps)), **conf)
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()


def add(app: Celery, name: str = "add") -> Any:
    """Add a singleton task to an app."""

    @app.task(shared=False, name=name, base=SingletonTask, unique_on=[])
    def add(x: int, y: int = 1) -> int:
        return x + y

    return add


def test_eager_chain(make_app: Callable[..., Celery]) -> None:
    """An eager chain takes no locks, and hands on values."""
    task = add(make_app())
    with locked(task, 0):
        assert 3 == chain(task.s(1), task.s())().get()


def test_eager_chain_with_locks(make_app: Callable[..., Celery]) -> None:
    """With ``singleton_lock_eager`` each step of an eager chain has the lock, and frees it for the next."""
    task = add(make_app(singleton_lock_eager=True))
    assert 3 == chain(task.s(1), task.s())().get()
    with locked(task, 0):
        assert task.delay(1).get() is None


def test_two_apps(make_app: Callable[..., Celery]) -> None:
    """Tasks of one name in two apps have a lock in each app's store."""
    first, second = (add(make_app(singleton_lock_eager=True)) for _ in range(2))
    with locked(first, 0):
        assert first.delay(1).get() is None
        assert 2 == second.delay(1).get()


def test_one_class_in_two_apps(make_app: Callable[..., Celery]) -> None:
    """A class that two apps register is locked in both; as Celery has it, its app is the last one."""

    class Add(SingletonTask):
        unique_on = ()

        def run(self, x: int) -> int:
            return x + 1

    first, second = (make_app(singleton_lock_eager=True).register_task(Add()) for _ in range(2))
    for task in (first, second):
        assert 2 == task.delay(1).get()
        with locked(task, 0):
            assert task.delay(1).get() is None
