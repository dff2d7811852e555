"""Locks by their keys: who holds one, and how to release it safely. `celery singleton` is a client of this module.

A key is what logs, errors, events and `lock_key_for()` show. No task module is needed, and a worker only to release a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import logger

#: What the node of a holder said about it.
RUNNING, UNKNOWN, SILENT = "running", "unknown", "silent"


@dataclass(frozen=True)
class Release:
    """What became of a request to release a lock.

    Arguments:
        outcome: `"released"`, or in a dry run `"would be released"`; `"refused"`, as the body may run; `"free"`, if nobody held
            it; `"changed"`, if the holder's lease ended meanwhile.
        holder: who held it.
        answer: what the holder's node said: it runs this task (`"running"`), it does not (`"unknown"`), or nothing (`"silent"`).
            It is not asked if no body runs, and the text is empty then.
    """

    outcome: str
    holder: Holder | None = None
    answer: str = ""

    @property
    def released(self) -> bool:
        """Whether the lock was revoked from its holder."""
        return self.outcome == "released"

    def __str__(self) -> str:
        if self.holder is None:
            return "free: nobody held it"
        said = {
            RUNNING: f"{self.holder.node} runs this task",
            UNKNOWN: f"{self.holder.node} does not run this task",
            SILENT: f"{self.holder.node} did not answer",
            "": f"no body ran ({self.holder.state})",
        }[self.answer]
        return f"{self.outcome}: {said}; held by {self.holder}"


def show(app: Any, key: str) -> Holder | None:
    """Return who holds a lock, or None.

    Raises:
        ConfigurationError: this is no key of the app's locks, or the app has no store.
        StoreError: the store is unreachable, or refused.
    """
    _base_of(app, key)
    return context_of(app).store.holder(key)


def release(app: Any, key: str, force: bool = False, dry_run: bool = False, timeout: float = 1.0) -> Release:
    """Revoke a lock whose body does not run any more. Its holder, if it runs after all, is told that the lease is lost.

    The node of the holder is asked whether it runs the task. If it does, or does not answer, only `force` revokes the lock.

    Arguments:
        force: revoke it whatever the node says. Another body may then start while the first one runs.
        dry_run: only ask.
        timeout: seconds in which the node must answer.

    Raises:
        ConfigurationError: this is no key of the app's locks, or the app has no store.
        StoreError: the store is unreachable, or refused.
    """
    base, store = _base_of(app, key), context_of(app).store
    found = store.holder(key)
    if found is None:
        return Release("free")
    answer = _answer_of_node(app, found, timeout) if found.state == "running" else ""
    if answer in (RUNNING, SILENT) and not force:
        return Release("refused", found, answer)
    if dry_run:
        return Release("would be released", found, answer)
    revoked = store.revoke(base, key, task_id=found.task_id)  # not from another task, which may have started meanwhile
    return Release("released" if revoked else "changed", found, answer)


def _base_of(app: Any, key: str) -> str:
    """Return what all keys of the task begin with."""
    prefix = context_of(app).settings.prefix
    base, _, digest = key.rpartition(":lock:")
    if not (digest and base.startswith(f"{prefix}:{{") and base.endswith("}")):
        raise ConfigurationError(f"{key!r} is no key of a lock of this app: such a key begins with '{prefix}:{{'")
    return base


def _answer_of_node(app: Any, found: Holder, timeout: float) -> str:
    """Ask the holder's node, which must answer in time, whether it runs the holder."""
    replies: Any = ()
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            replies = app.control.broadcast(
                "singleton_locks", destination=[found.node], reply=True, timeout=timeout, connection=connection
            )
    except Exception as error:  # the broker
        logger.warning("%s could not be asked: %s", found.node, error)
    for reply in replies or ():
        known = reply.get(found.node)
        if isinstance(known, list):  # else an error: of a worker without this command
            return RUNNING if any(one["task_id"] == found.task_id for one in known) else UNKNOWN
    return SILENT
