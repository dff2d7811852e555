"""Who holds a lock now."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.texts import printable


class Holder(NamedTuple):
    """The delivery that holds a lock.

    Arguments:
        task_id: id of the task that runs; empty in an operator's pause.
        node: name of its worker node.
        pid: process that runs the body.
        age: seconds since it was granted, by the store's clock.
        remaining: seconds until the lease expires unless it is renewed.
        fence: number of the lease, which only grows from lease to lease of a task name or group; 0 if it is not known.
        state: `"running"` while a body runs; `"queued"` while the message waits; `"cooldown"` for the rest of `lock_at_least`;
            `"paused"` by an operator (`locks.pause`).
        by: which operator has paused it.
        reason: why.
        renewed: seconds since the process of the body renewed the lease, or was granted it. None: no body runs, or the store was
            not asked about it, as for a duplicate.
        hung: whether that is more than a `lock_ttl` ago. The body may hang: only its worker's main process renews the lease.
    """

    task_id: str = ""
    node: str = ""
    pid: int = 0
    age: float = 0.0
    remaining: float = 0.0
    fence: int = 0
    state: str = "running"
    by: str = ""
    reason: str = ""
    renewed: float | None = None
    hung: bool = False

    def with_renewal(self, renewed: float, ttl: float) -> Holder:
        """Return the same with the time since its process renewed its lease, of a `lock_ttl`, if a body runs."""
        renewed = max(0.0, renewed)
        return self._replace(renewed=renewed, hung=renewed > ttl) if self.state == "running" else self

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return self._asdict()

    def __str__(self) -> str:
        expires = f"expires in {duration_text(self.remaining)}"
        if self.state == "paused":
            known = [f"by {self.by}"] * bool(self.by) + [self.reason] * bool(self.reason)
            since = [f"for {duration_text(self.age)}"] * bool(known)
            return printable(f"an operator's pause ({', '.join([*known, *since, expires])})")
        task = printable(f"task {self.task_id}" if self.task_id else "another task")
        if self.state == "running" and not self.node:  # nothing else is known
            return task
        if self.state == "queued" and not self.remaining:  # the first in line for a free lock
            return f"{task} (queued)"
        where = f"on {printable(self.node)} (pid {self.pid}," if self.state == "running" else f"({self.state}"
        renewed = "" if self.renewed is None else f" renewed {duration_text(self.renewed)} ago,"
        if self.hung and self.renewed is not None:
            renewed = f" hung? its process has not renewed it for {duration_text(self.renewed)},"
        return f"{task} {where} for {duration_text(self.age)},{renewed} {expires})"
