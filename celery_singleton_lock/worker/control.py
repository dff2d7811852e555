"""Remote control commands: `singleton_locks`, what a worker knows of the tasks that it runs under locks; `singleton_replace`.

This module is also imported by the `celery` command, which must know the names of all such commands. So it imports little.
"""

from __future__ import annotations

import os
from typing import Any

from celery.worker.control import control_command, inspect_command

from celery_singleton_lock.remote import CANNOT_TERMINATE, LOCKS, REPLACE


@inspect_command(name=LOCKS)  # type: ignore[untyped-decorator]
def singleton_locks(state: Any, **_: Any) -> dict[str, Any]:
    """Tasks with locks that this worker runs, and how its store does."""
    from celery_singleton_lock.context import context_of

    return {"tasks": tasks_with_locks(state.app), "store": context_of(state.app).outages.status()}


@control_command(name=REPLACE, args=[("task_id", str), ("replacement", str)], signature="<task_id> <replacement>")  # type: ignore[untyped-decorator]
def singleton_replace(state: Any, task_id: str, replacement: str, **_: Any) -> dict[str, Any]:
    """Terminate a task that a newer message replaces."""
    from celery.worker.state import active_requests

    from celery_singleton_lock.worker.request import DeliveryMixin

    requests: list[Any] = [request for request in list(active_requests) if isinstance(request, DeliveryMixin)]
    for request in [request for request in requests if request.id == task_id]:
        try:
            request.terminate_replaced(state.consumer.pool, replacement)
        except NotImplementedError:  # threads
            return {"error": CANNOT_TERMINATE}
    return {"ok": task_id}


def tasks_with_locks(app: Any) -> list[dict[str, Any]]:
    """Return the singleton tasks that this worker has received and that have not ended, without I/O.

    Each is a dict: `task`, `task_id`, `key`, `pid` and `held`. `pid` is None until a process has begun the task. `held` tells
    whether its body may go on under its lock; it is None where another process knows that (prefork), and before it has begun.
    A body whose lease was lost for good, and is not renewed any more, may still run.
    """
    from celery.worker.state import reserved_requests

    from celery_singleton_lock.context import context_of
    from celery_singleton_lock.worker.request import DeliveryMixin

    leases = {lease.spec.task_id: lease for lease in context_of(app).renewer.leases()}
    found = []
    requests: list[Any] = [request for request in list(reserved_requests) if isinstance(request, DeliveryMixin)]
    for request in requests:
        lease = leases.get(request.id)
        if lease:
            own = {"key": lease.spec.lock, "pid": lease.spec.pid, "held": lease.held}
        else:
            own = {"key": request.lock_key(), "pid": request.worker_pid, "held": None}
            if request.worker_pid and not request.supervisor:  # in gevent and eventlet, it is the id of a greenlet
                own.update(pid=os.getpid(), held=False)
        found.append({"task": request.name, "task_id": request.id, **own})
    return found
