"""The same task without a lock, with ours, and with each peer that is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from celery import Celery
from celery.exceptions import Ignore

from celery_singleton_lock import SingletonTask

#: The arguments whose key is measured: three scalars.
SCALARS = (1042, "account-17", 0.0)

#: Names of the tasks, in the order of the tables.
BARE, OURS, ONCE, SINGLETON = "bare task", "this library", "celery-once", "celery-singleton"
#: A bare task of workers alone, whose body sends what the library would send, over a raw socket.
WIRE = "bare task, raw socket"
#: The same over a connection of redis-py.
CONNECTION = "bare task, redis-py"
#: The same over a raw socket, with the least Python that makes these commands anew for each task.
LEAST = "bare task, least Python"


def make_app(broker: str, store: str) -> Celery:
    """An app whose messages and locks live on two servers; nothing stores results, which cost all tasks alike.

    Arguments:
        broker: URL of the server for messages.
        store: URL of the server for locks.
    """
    app = Celery("benchmarks", broker=broker, set_as_current=False)
    app.conf.update(
        singleton_lock_url=store,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
    )
    if find_spec("celery_singleton"):
        app.conf.singleton_backend_url = store
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": store}}
    return app


def base_classes() -> dict[str, Any]:
    """The base class of each kind of task; peers that are not installed are left out."""
    found: dict[str, Any] = {BARE: None, OURS: SingletonTask}
    if find_spec("celery_once"):
        from celery_once import QueueOnce

        found[ONCE] = QueueOnce
    if find_spec("celery_singleton"):
        from celery_singleton import Singleton

        found[SINGLETON] = Singleton
    return found


def add_tasks(app: Celery, body: Callable[[int, str, float], None]) -> dict[str, Any]:
    """Tasks with this body, by kind."""
    bases = base_classes()
    for kind, base in bases.items():
        declare(app, kind.replace(" ", "-"), base, body)
    app.finalize(auto=True)
    return {kind: app.tasks[f"benchmarks.{kind.replace(' ', '-')}"] for kind in bases}


def declare(app: Celery, name: str, base: Any, body: Callable[..., object], **options: Any) -> Any:
    """Declare a task of this app alone; without a base class it is a plain one."""
    if base is not None:
        options["base"] = base
    return app.task(name=f"benchmarks.{name}", shared=False, **options)(body)


def declare_floor(app: Celery, kind: str, body: Callable[..., object], **options: Any) -> Any:
    """Declare one of the bare tasks of workers alone."""
    return declare(app, kind.replace(" ", "-").replace("µ", "u"), None, body, **options)


def ignored(number: int, account: str, seconds: float = 1.0) -> None:
    """A body that ends as a duplicate does: what that alone costs Celery's tracer."""
    raise Ignore("not wanted")


def nothing(number: int, account: str, seconds: float = 1.0) -> None:
    """A body that does nothing."""
