"""Releases locks whose bodies do not run any more, after asking the holders' worker nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_singleton_lock import remote
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.locks.naming import checked, parts_of
from celery_singleton_lock.locks.reading import find, show
from celery_singleton_lock.log import logger
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.records import Lock
from celery_singleton_lock.texts import printable

#: What the node of a holder said about it.
RUNNING, UNKNOWN, SILENT = "running", "unknown", "silent"
#: It was not asked, as the broker could not be reached.
UNREACHABLE = "unreachable"
#: More answers than there are: Celery would stop at the first one of each node, and two workers may have one name.
_ALL_ANSWERS = 1_000_000
#: Seconds in which a node that is not busy has answered.
_SHORT = 1.0
#: Seconds after which a worker knows that one of its processes has begun a task.
_START_REPORT_DELAY = 5.0


@dataclass(frozen=True)
class ReleaseReport:
    """The outcome of a request to release a lock.

    Arguments:
        outcome: `"released"`, or in a dry run `"would be released"`; `"refused"`, as the body may run; `"free"`, if nobody held
            it; `"changed"`, if the holder's lease ended meanwhile, or another task holds it.
        key: of the lock.
        holder: who held it.
        answer: what the holder's node said: it runs this task (`"running"`), it does not (`"unknown"`), or nothing (`"silent"`);
            `"unreachable"`: it was not asked, as the broker could not be reached. Empty: it was not asked, as no body runs.
        others: if nobody held it: what else keeps a task with this key from starting.
    """

    outcome: str
    key: str
    holder: Holder | None = None
    answer: str = ""
    others: Sequence[Lock] = ()

    @property
    def released(self) -> bool:
        """Whether the lock was taken from its holder."""
        return self.outcome == "released"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        others = [lock.as_dict() for lock in self.others]
        return {**vars(self), "holder": self.holder and self.holder.as_dict(), "others": others}

    def __str__(self) -> str:
        if self.holder is None:
            return "free: nobody held it"
        if self.outcome == "changed":
            return "changed: the task that was asked about does not hold it any more"
        node = printable(self.holder.node)
        said = {
            RUNNING: f"{node} runs this task",
            UNKNOWN: f"{node} does not run this task",
            SILENT: f"{node} did not answer",
            UNREACHABLE: f"the broker could not be reached, so {node} was not asked",
            "": f"no body ran ({self.holder.state})",
        }[self.answer]
        return f"{self.outcome}: {said}; held by {self.holder}"


def release(
    app: Any, key: str, force: bool = False, dry_run: bool = False, timeout: float = 1.0, task_id: str = ""
) -> ReleaseReport:
    """Release a lock whose body does not run any more. Its holder, if it runs after all, is told that the lease is lost.

    The node of the holder is asked whether it runs the task. If it does, or does not answer, only `force` releases the lock.

    Arguments:
        force: release it whatever the node says. Another body may then start while the first one runs.
        dry_run: only ask.
        timeout: seconds in which the node must answer.
        task_id: release it only if this task holds it.

    Returns what became of it; if nobody held it, also what else keeps a task with this key from starting.
    """
    base, _ = checked(app, key)
    found = context_of(app).store.holder(key)
    if found is None:
        return ReleaseReport("free", key, others=show(app, key))
    if task_id not in ("", found.task_id):
        return ReleaseReport("changed", key, found)
    (answer,) = answers_of(app, [found], timeout)
    return revoke(context_of(app).store, base, ReleaseReport("", key, found, answer), force, dry_run)


def release_all(
    app: Any,
    task: str = "",
    node: str = "",
    force: bool = False,
    dry_run: bool = False,
    timeout: float = 1.0,
    told: Callable[[ReleaseReport], object] = lambda one: None,
) -> Sequence[ReleaseReport]:
    """Do as `release` with each lock of a task or group, or of a worker node; each node is asked once.

    Arguments:
        told: is called with each result as it comes, so that those before an error are known, too.

    Raises:
        ConfigurationError: neither task nor node is given, or the app has no store.
        StoreError: the store is unreachable, or refuses. Locks that were released before stay released.
    """
    if not (task or node):
        raise ConfigurationError("name a task or a worker node")
    # All are found before their nodes are asked: a node does not know a task that starts after its answer.
    found = [lock for lock in find(app, task, node) if lock.holder.state != "paused"]
    answers, store = answers_of(app, [lock.holder for lock in found], timeout), context_of(app).store
    done = []
    for lock, answer in zip(found, answers, strict=True):
        asked = ReleaseReport("", lock.key, lock.holder, answer)
        done.append(revoke(store, parts_of(app, lock.key)[0], asked, force, dry_run))
        told(done[-1])
    return done


def answers_of(app: Any, holders: Sequence[Holder], timeout: float) -> list[str]:
    """Return what the node of each holder says about it. All nodes are asked at once, and must answer in time."""
    nodes = sorted({holder.node for holder in holders if holder.state == "running"})
    known = _tasks_of_nodes(app, nodes, timeout) if nodes else {}
    answers = []
    for holder in holders:
        if holder.state != "running":
            answers.append("")
        elif known is None:
            answers.append(UNREACHABLE)
        elif holder.node not in known:
            answers.append(SILENT)
        else:
            answers.append(RUNNING if _runs(holder, known[holder.node]) else UNKNOWN)
    return answers


def _runs(holder: Holder, known: Sequence[tuple[str, int | None]]) -> bool:
    """Tell whether a node's answer names the holder's lease.

    A message that has only been received has no process: a redelivery, say, of the holder's whose process is dead. But a node
    may answer before it has heard that a process has begun the task.
    """
    processes: tuple[int | None, ...] = (holder.pid, None) if holder.age < _START_REPORT_DELAY else (holder.pid,)
    return any((holder.task_id, pid) in known for pid in processes)


def _tasks_of_nodes(app: Any, nodes: Sequence[str], timeout: float) -> dict[str, list[tuple[str, int | None]]] | None:
    """Return the id and the process of each task that nodes have received or run under locks, of the nodes that answer.

    Two workers may have one name, so the whole time is waited, and all answers count. It is short for nodes that answer at once;
    those that do not are asked again, for twice as long each time.

    None: the broker could not be reached.
    """
    known: dict[str, list[tuple[str, int | None]]] = {}
    spent, patience = 0.0, min(_SHORT, timeout)
    while missing := [node for node in nodes if node not in known]:
        try:
            replies = remote.ask(app, remote.LOCKS, missing, patience, limit=_ALL_ANSWERS)
        except Exception as error:  # the broker
            logger.warning("%s could not be asked: %s", ", ".join(nodes), error)
            return None
        for node, told in [item for reply in replies for item in reply.items()]:
            if "tasks" in told:  # else the error of a worker without this command
                known.setdefault(node, []).extend((one["task_id"], one["pid"]) for one in told["tasks"])
        spent += patience
        if spent >= timeout:
            break
        patience = min(2 * patience, timeout)
    return known


def revoke(store: LockStore, base: str, asked: ReleaseReport, force: bool, dry_run: bool) -> ReleaseReport:
    """Take a lock from its holder if the node's answer allows that, or with `force`; return what became of it."""
    assert asked.holder
    if asked.answer in (RUNNING, SILENT, UNREACHABLE) and not force:
        return replace(asked, outcome="refused")
    if dry_run:
        return replace(asked, outcome="would be released")
    # Not from another lease, which may have begun meanwhile.
    revoked = store.revoke(base, asked.key, fence=asked.holder.fence)
    return replace(asked, outcome="released" if revoked else "changed")
