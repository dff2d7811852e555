"""Which locks exist, and what they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from celery_singleton_lock.context import context_of
from celery_singleton_lock.locks.naming import (
    base_of,
    checked,
    given,
    groups_of,
    is_digest,
    names_of,
    parts_of,
    reader_of,
    records_of,
)
from celery_singleton_lock.store.records import WHOLE_TASK, Lock, Run, Statistics, task_of


def find(app: Any, task: str = "", node: str = "", min_age: float = 0.0) -> Sequence[Lock]:
    """Return operators' pauses, and then the other locks that exist, in no order.

    Arguments:
        task: only of this task or group.
        node: only held on this worker node.
        min_age: only held for at least so many seconds, and all operators' pauses.
    """
    records = records_of(app)
    found = records.locks(*(base_of(app, name) for name in names_of(app, task)))
    chosen = [one for one in found if one.exists and _is_old(one, min_age) and node in ("", one.holder.node)]
    return sorted(chosen, key=lambda one: one.holder.state != "paused")


def _is_old(lock: Lock, min_age: float) -> bool:
    return lock.holder.age >= min_age or lock.holder.state == "paused"


def tasks(app: Any) -> Sequence[str]:
    """Return the names of tasks and groups that workers have had, or publishers a lock for, since the store has its data."""
    records_of(app)
    return sorted(set(groups_of(app).values()))


def show(app: Any, key: str) -> Sequence[Lock]:
    """Return the locks that keep a task with this key from starting: of all its holders, and operators' pauses.

    With the key of a slot, the holder of this slot alone. The digest of a key stands for the key. With the id of a task, the lock
    that this task holds; with the name of a task or group, all its locks.
    """
    if ":lock:" not in key:
        return _named(app, given(key))
    base, digest = checked(app, key)
    reader, store = reader_of(app), context_of(app).store
    keys = [key, *reader.slots(base, digest)] if key.endswith(digest) else [key]
    pauses, recorded = [], {}
    for lock in reader.locks(base):
        if lock.holder.state != "paused":
            recorded[lock.key, lock.holder.fence] = lock
        elif lock.key in (f"{base}:lock:{digest}", f"{base}:lock:{WHOLE_TASK}"):
            pauses.append(lock)
    holders = [(one, holder) for one in keys if (holder := store.holder(one))]
    return [
        *(recorded.get((one, holder.fence)) or Lock(task_of(base), one, holder) for one, holder in holders),
        *pauses,
    ]


def _named(app: Any, name: str) -> Sequence[Lock]:
    groups = groups_of(app)
    if name in {*groups, *groups.values()}:
        return find(app, name)
    found = find(app)
    if of_task := [lock for lock in found if lock.holder.task_id == name]:
        return of_task
    if is_digest(name):
        parts = (parts_of(app, lock.key) for lock in found)
        keys = {f"{base}:lock:{digest}" for base, digest in parts if digest == name.removeprefix("lock:")}
        return [lock for key in sorted(keys) for lock in show(app, key)]
    return find(app, name)  # a name that no worker has registered


def stats(app: Any, task: str = "") -> Sequence[Statistics]:
    """Return the counters of each task, or of one, and how many of its locks exist now.

    The names of counters, with labels after a colon:

    * `acquired`, `reacquired`, `expired`, `released_by_operator`, and `released:` with `success`, `failure`, `retry`, `other`, or
      `started` (``lock_until="start"``: the end of the body is not seen). While the store loses nothing, acquired + reacquired =
      released + expired + released_by_operator + what exists now (`Statistics.held`).
    * `duplicates:` with the policy's name, `callable` or `custom`: messages that found the lock held, each counted once.
      `redelivery_checks`: deliveries of a message that another delivery runs. `starts_refused`: by `max_starts`.
    * `lost:` with `expired`, `not_owner`, `released_by_operator` or `lock_at_most`; `renewals`, `renewal_failures`,
      `store_errors:` with the verb: counted by the processes of bodies, which report them within some ten seconds.
    * `hold:` and `wait:` with an upper bound in seconds: how many leases were held, and how many messages waited, at most so
      long, and longer than the bound before; `hold_ms` and `wait_ms`: the sums, in milliseconds.
    * `last_start`, `last_success`: when, in milliseconds since 1970.
    """
    records, names = records_of(app), names_of(app, task)
    found = records.recorded(*(base_of(app, name) for name in names))
    return [_statistics(name, *recorded) for name, recorded in zip(names, found, strict=True)]


def _statistics(name: str, counters: Mapping[str, int], locks: Sequence[Lock]) -> Statistics:
    states: Counter[str] = Counter()
    since: dict[str, float] = {}
    blocked = 0
    for lock in locks:
        if lock.missing and lock.holder.state == "cooldown":  # one that is over, and no lease
            continue
        if lock.missing:
            states["missing"] += 1
            continue
        state = lock.holder.state
        states[state] += 1
        blocked = max(blocked, lock.duplicates)
        since[state] = min(since.get(state, lock.since), lock.since)
    oldest = since.get("running", 0.0), blocked, since.get("queued", 0.0), since.get("paused", 0.0)
    return Statistics(name, counters, dict(states), *oldest)


def history(app: Any, task: str) -> Sequence[Run]:
    """Return the last runs of a task, or under one key, the newest first: of `singleton_lock_history` of them for each task."""
    records = records_of(app)
    key = task if "}:lock:" in task else ""
    base = checked(app, key)[0] if key else base_of(app, *names_of(app, given(task)))
    records.sweep(base)
    return [run for run in records.history(base) if not key or f"{run.key}:".startswith(f"{key}:")]
