"""What a store records of locks: which ones exist now, counters, and the last runs. The lock scripts write it.

A call without `RunRecord` records nothing (`singleton_lock_stats=False`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from celery_singleton_lock.holder import Holder

#: How a body ended when its lock was released; `started`: the lock is released at the start (``lock_until="start"``).
OUTCOMES = ("success", "failure", "retry", "other", "started")
#: Why a lease was lost: its deadline passed, another delivery has the lock, an operator released it, or `lock_at_most` passed.
LOSSES = ("expired", "not_owner", "released_by_operator", "lock_at_most")
#: What a lock that exists is, see `Holder.state`.
STATES = ("running", "queued", "cooldown", "paused")
#: Calls to the store whose failures are counted.
VERBS = ("acquire", "release", "renew")
#: Upper bounds of the histograms of hold and wait times, in seconds, as `_observe.lua` writes them.
BOUNDS = ("0.1", "1", "5", "15", "60", "300", "900", "3600", "14400", "inf")
#: How many characters of an error the history keeps.
LONGEST_ERROR = 100
#: Separates the fields of an entry of the registry and of the history.
SEPARATOR = "\x1f"
_EMPTY: Mapping[str, int] = MappingProxyType({})
#: Name of a pause of a whole task name, among those of single lock keys.
WHOLE_TASK = "*"


class RunRecord(NamedTuple):
    """Notes on a request for the records, besides its own fields.

    Arguments:
        policy: which policy decides, if the request is a duplicate; empty if the message was counted before.
        waited: seconds that the message has waited for its lock, apart from its time in line.
        outcome: how a release comes about: one of `OUTCOMES`.
        error: the beginning of the body's error.
        fence: of the lease of a body that has ended; 0 for what had no body.
        loss: why the lease was lost: one of `LOSSES`, or empty.
    """

    policy: str = ""
    waited: float = 0.0
    outcome: str = "other"
    error: str = ""
    fence: int = 0
    loss: str = ""


#: Of a request that says it all.
NO_RECORD = RunRecord()


class Lock(NamedTuple):
    """A lock that exists.

    Arguments:
        task: the task name, or the lock group.
        key: the lock key.
        holder: who holds it.
        duplicates: how many duplicates the holder has met.
        waiting: how many messages wait in line for it.
        since: when it was granted, or the pause began, in seconds since 1970, by the store's clock.
        missing: whether its key is not in the store, or is another lease's: it counts as expired when its time is over.
    """

    task: str
    key: str
    holder: Holder
    duplicates: int = 0
    waiting: int = 0
    since: float = 0.0
    missing: bool = False

    @property
    def exists(self) -> bool:
        """Whether somebody holds it now. A lease that has expired stays in the registry until it is counted."""
        return self.holder.remaining > 0 and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**self._asdict(), "holder": self.holder.as_dict()}


class Run(NamedTuple):
    """A run that has ended. Times are in seconds since 1970, by the store's clock.

    Arguments:
        task: the task name, or the lock group.
        key: the lock key.
        task_id: id of the task.
        node: its worker node.
        pid: its process.
        started: when the lock was granted.
        ended: when the body ended; when an operator released the lease, or it expired, as long as the end of its body is not
            known.
        outcome: how the body ended: `"success"`, `"failure"`, `"retry"` or `"other"`; else how its lease did:
            `"released_by_operator"` or `"expired"`.
        error: the beginning of the body's error.
        lease: what became of its lease: `"released"`, or why it was lost: one of `LOSSES`.
    """

    task: str
    key: str
    task_id: str
    node: str
    pid: int
    started: float
    ended: float
    outcome: str
    error: str = ""
    lease: str = "released"

    @property
    def duration(self) -> float:
        """Seconds from the grant to the end. A lease that expired was held for up to `lock_ttl` longer than its body ran."""
        return self.ended - self.started

    def as_dict(self) -> dict[str, Any]:
        """The fields and the duration, for JSON."""
        return {**self._asdict(), "duration": self.duration}


class Statistics(NamedTuple):
    """The counters of one task name or lock group, and its locks now.

    Arguments:
        task: the task name, or the lock group.
        counters: see `locks.stats`.
        states: how many locks are in each of `STATES` now, and `missing`: leases whose key is not in the store, which count as
            expired soon.
        oldest: when the oldest of the running ones was granted, in seconds since 1970; 0 if there is none.
        blocked: the most duplicates that one of the present holders has met.
        oldest_reservation: when the oldest of the queued ones was acquired, as `oldest`.
        oldest_pause: when the oldest of the paused ones was paused, as `oldest`.
    """

    task: str
    counters: Mapping[str, int] = _EMPTY
    states: Mapping[str, int] = _EMPTY
    oldest: float = 0.0
    blocked: int = 0
    oldest_reservation: float = 0.0
    oldest_pause: float = 0.0

    def sum(self, name: str) -> int:
        """Return the sum of a counter over all its labels: `sum("released")` of `released:success` and the others."""
        return sum(count for field, count in self.counters.items() if field.partition(":")[0] == name)

    @property
    def held(self) -> int:
        """How many leases exist now: acquired + reacquired - released - expired - released_by_operator.

        Cooldowns and pauses are no leases.
        """
        return sum(self.states.get(state, 0) for state in ("running", "queued", "missing"))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**self._asdict(), "counters": {**self.counters}, "states": {**self.states}}


def task_of(base: str) -> str:
    """Return the task name or lock group in what all its keys begin with."""
    return unquote(base.partition("{")[2].removesuffix("}"))


class RecordStore(Protocol):
    """Reads what the scripts have recorded. `base` is what all keys of a task name begin with.

    Each method raises `StoreError`.
    """

    def add_tasks(self, key: str, tasks: Mapping[str, str]) -> None:
        """Note the names of tasks, each with the name that its locks have: its own, or that of its lock group."""

    def tasks(self, key: str) -> Mapping[str, str]:
        """Return what `add_tasks` has noted."""

    def slots(self, base: str, digest: str) -> list[str]:
        """Return the keys of the slots above the first one that holders of a lock may have."""

    def sweep(self, *bases: str) -> None:
        """Count the leases that have expired as such, so that only those that exist are left in the registry.

        A store that takes no writes leaves it for later.
        """

    def locks(self, *bases: str) -> Iterator[Lock]:
        """Yield the locks that exist, those of operators' pauses included."""

    def recorded(self, *bases: str) -> Iterator[tuple[Mapping[str, int], list[Lock]]]:
        """Yield all counters and locks of each name, after `sweep`."""

    def count(self, base: str, counted: Mapping[str, int]) -> None:
        """Add to counters what a process has counted."""

    def counters(self, base: str) -> Mapping[str, int]:
        """Return all counters."""

    def history(self, base: str) -> list[Run]:
        """Return the last runs, the newest first."""

    def pause(self, base: str, name: str, seconds: float, by: str = "", reason: str = "") -> None:
        """Have no body start for so long: of a lock key's digest, or of `WHOLE_TASK`."""

    def resume(self, base: str, name: str) -> bool:
        """End a pause; tell whether there was one."""

    def server(self) -> Mapping[str, str]:
        """Return what the server says of itself (INFO)."""
