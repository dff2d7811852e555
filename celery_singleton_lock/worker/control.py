"""The remote control command `singleton_locks`: what a worker itself knows of the locks that its bodies hold.

This module is also imported by the `celery` command, which must know the names of all such commands. So it imports little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.worker.control import inspect_command

if TYPE_CHECKING:
    from celery_singleton_lock.store.protocol import LeaseRequest


@inspect_command()  # type: ignore[untyped-decorator]
def singleton_locks(state: Any, **_: Any) -> list[dict[str, Any]]:
    """Locks of the bodies that this worker runs."""
    return own_locks(state.app)


def own_locks(app: Any) -> list[dict[str, Any]]:
    """Return what this process knows of its locks, without I/O.

    Each is a dict: `task` (the name, or the lock group), `task_id`, `pid`, `key` and `held`. The main process of a prefork worker
    knows neither the key nor whether the lease was lost: they are empty and None.
    """
    from celery_singleton_lock.context import context_of

    context = context_of(app)
    found: list[tuple[LeaseRequest, str, bool | None]]
    found = [(lease.request, lease.request.lock, lease.held) for lease in context.renewer.leases()]
    if context.supervisor is not None:
        found += [(lease.request, "", None) for lease in context.supervisor.running()]
    return [
        {"task": _tag(request.base), "task_id": request.task_id, "pid": request.pid, "key": key, "held": held}
        for request, key, held in found
    ]


def _tag(base: str) -> str:
    """Return what is between the braces of a key: the name of the task or of its group."""
    return base.partition("{")[2].rpartition("}")[0]
