"""Records runs, duplicates, lost leases and workers in the ledger."""

# Celery has no types of its own, its decorators neither.
# mypy: disallow-untyped-decorators=False

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from celery.signals import worker_init, worker_ready

from celery_singleton_lock import Holder, SingletonTask, signals
from example_project import ledger

_INSERT = "INSERT INTO runs (task, work, key, task_id, node, pid, fence, started) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@contextmanager
def recorded(task: SingletonTask, work: str) -> Iterator[None]:
    """Record the start and the end of a body. A killed body has no end."""
    request = task.request
    lease = task.lease
    row = (short(task), work, lease.key, request.id, request.hostname, os.getpid(), lease.fence, monotonic())
    with ledger.transaction() as connection:
        run = connection.execute(_INSERT, row).lastrowid
    try:
        yield
    finally:
        with ledger.transaction() as connection:
            connection.execute("UPDATE runs SET ended = ? WHERE id = ?", (monotonic(), run))


def short(task: SingletonTask) -> str:
    """Return a task's name without its module."""
    return str(task.name).rpartition(".")[2]


@signals.duplicate.connect
def on_duplicate(sender: SingletonTask, key: str, task_id: str, holder: Holder, policy: object, **_: Any) -> None:
    """Record a duplicate under the name of its policy."""
    node = str(sender.request.hostname)
    kind = type(policy).__name__
    ledger.note(kind, task=short(sender), key=key, task_id=task_id, node=node, holder=str(holder.node))


@signals.lock_lost.connect
def on_lost(sender: SingletonTask, lease: Any, **_: Any) -> None:
    """Record a lost lease, which is a fault in this demo."""
    ledger.note("lost", task=short(sender), key=lease.key, node=str(sender.request.hostname))


@worker_init.connect
def on_init(**_: Any) -> None:
    """Create the ledger before the first task."""
    ledger.create()


@worker_ready.connect
def on_ready(sender: Any, **_: Any) -> None:
    """Record that a worker is ready for messages."""
    ledger.note("ready", node=str(sender.hostname))
