"""Locks as an operator sees them: which ones exist, what they did, and how to release one safely.

`celery singleton`, the exporter and the Django admin are clients of this module. No task module is needed; workers and the
broker only to release a lock. A key is what logs, errors, events and `lock_key_for()` show; `task` is the name of a task, or of
a `lock_group`.

All functions raise `ConfigurationError` if the app has no store, or one that keeps no records, and `StoreError` if the store is
unreachable or refuses. Records are kept while `singleton_lock_stats` is on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery_singleton_lock.config.options import LONGEST
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.revoking import Release, answers_of, revoke
from celery_singleton_lock.signature.canonical import escaped
from celery_singleton_lock.store.records import WHOLE_TASK, Lock, RecordStore, Run, Statistics, task_of

# -- what exists -------------------------------------------------------------------------------


def list(app: Any, task: str = "", node: str = "", min_age: float = 0.0) -> Iterator[Lock]:
    """Yield the locks that exist, in no order, those of operators' holds included.

    Arguments:
        task: only of this task or group.
        node: only held on this worker node.
        min_age: only held for at least so many seconds.
    """
    records = _records(app)
    for name in [task] if task else tasks(app):
        for lock in records.locks(_base(app, name)):
            if lock.exists and lock.holder.age >= min_age and node in ("", lock.holder.node):
                yield lock


def tasks(app: Any) -> Sequence[str]:
    """Return the names of the tasks and groups that workers have had since the store has its data."""
    return _records(app).tasks(_tasks_key(app))


def show(app: Any, key: str) -> Holder | None:
    """Return who holds a lock, or None.

    Raises:
        ConfigurationError: this is no key of the app's locks, or the app has no store.
    """
    _base_of(app, key)
    _reader(app)
    return context_of(app).store.holder(key)


def find(app: Any, key: str) -> Sequence[Lock]:
    """Return the locks that keep a task with this key from starting: of all holders of its signature, and operators' holds.

    Raises:
        ConfigurationError: this is no key of the app's locks, or the app has no store.
    """
    base, holder = _base_of(app, key), show(app, key)
    same = (key, f"{base}:lock:{WHOLE_TASK}")
    found = [lock for lock in _reader(app).locks(base) if lock.exists]
    listed = [lock for lock in found if lock.key in same or lock.key.startswith(f"{key}:")]
    others = [lock for lock in listed if lock.key != key or lock.holder.is_operators_hold]
    if holder is None:
        return others
    exact = [lock for lock in listed if lock.key == key and lock.holder.fence == holder.fence]
    return [*(exact or [Lock(task_of(base), key, holder)]), *others]


def find_task_id(app: Any, task_id: str) -> Lock | None:
    """Return the lock that this task holds, or None."""
    return next((lock for lock in list(app) if lock.holder.task_id == task_id), None)


# -- what they did -----------------------------------------------------------------------------


def stats(app: Any, task: str = "") -> Sequence[Statistics]:
    """Return the counters of each task, or of one, and how many of its locks exist now.

    The names of counters, with labels after a colon:

    * `acquired`, `reacquired`, `expired`, `revoked`, and `released:` with `success`, `failure`, `retry`, `other`, or `started`
      (``lock_until="start"``: the end of the body is not seen). While the store loses nothing, acquired + reacquired = released +
      expired + revoked + what exists now (`Statistics.held`).
    * `duplicates:` with the policy's name, `callable` or `custom`: messages that found the lock held, each counted once.
      `redelivery_checks`: deliveries of a message that another delivery runs. `starts_refused`: by `max_starts`.
    * `lost:` with `expired`, `not_owner`, `revoked` or `lock_at_most`; `renewals`, `renewal_failures`, `store_errors:` with the
      verb: counted by the processes of bodies, which report all of it when they lose a lock of the task, or next acquire one.
    * `hold:` and `wait:` with an upper bound in seconds: how many leases were held, and how many messages waited, at most so
      long, and longer than the bound before; `hold_ms` and `wait_ms`: the sums, in milliseconds.
    * `last_start`, `last_success`: when, in milliseconds since 1970.
    """
    return [_statistics(app, name) for name in ([task] if task else tasks(app))]


def _statistics(app: Any, name: str) -> Statistics:
    records, base = _records(app), _base(app, name)
    records.sweep(base)
    states: Counter[str] = Counter()
    oldest, blocked = 0.0, 0
    for lock in records.locks(base):
        if lock.missing and lock.holder.state == "held":  # a hold that is over, and no lease
            continue
        if lock.missing:
            states["missing"] += 1
            continue
        states[lock.holder.state] += 1
        blocked = max(blocked, lock.duplicates)
        if lock.holder.state == "running":
            oldest = min(oldest or lock.since, lock.since)
    return Statistics(name, records.counters(base), dict(states), oldest, blocked)


def history(app: Any, task: str) -> Sequence[Run]:
    """Return the last runs of a task, the newest first: `singleton_lock_history` of them."""
    records, base = _records(app), _base(app, task)
    records.sweep(base)
    return records.history(base)


def server(app: Any) -> Mapping[str, str]:
    """Return what the server of the store says of itself (INFO)."""
    return _reader(app).server()


# -- what an operator does ---------------------------------------------------------------------


def release(
    app: Any, key: str, force: bool = False, dry_run: bool = False, timeout: float = 1.0, task_id: str = ""
) -> Release:
    """Revoke a lock whose body does not run any more. Its holder, if it runs after all, is told that the lease is lost.

    The node of the holder is asked whether it runs the task. If it does, or does not answer, only `force` revokes the lock.

    Arguments:
        force: revoke it whatever the node says. Another body may then start while the first one runs.
        dry_run: only ask.
        timeout: seconds in which the node must answer.
        task_id: release it only if this task holds it.

    Raises:
        ConfigurationError: this is no key of the app's locks, or the app has no store.
    """
    base, found = _base_of(app, key), show(app, key)
    if found is None:
        return Release("free", key)
    if task_id not in ("", found.task_id):
        return Release("changed", key, found)
    (answer,) = answers_of(app, [found], timeout)
    return revoke(context_of(app).store, base, Release("", key, found, answer), force, dry_run)


def release_all(
    app: Any, task: str = "", node: str = "", force: bool = False, dry_run: bool = False, timeout: float = 1.0
) -> Iterator[Release]:
    """Do as `release` with each lock of a task or group, or of a worker node; each node is asked once.

    Raises:
        ConfigurationError: neither task nor node is given, or the app has no store.
    """
    if not (task or node):
        raise ConfigurationError("name a task or a worker node")
    # All are found before their nodes are asked: a node does not know a task that starts after its answer.
    found = [lock for lock in list(app, task, node) if not lock.holder.is_operators_hold]
    for lock, answer in zip(found, answers_of(app, [lock.holder for lock in found], timeout), strict=True):
        asked = Release("", lock.key, lock.holder, answer)
        yield revoke(context_of(app).store, _base_of(app, lock.key), asked, force, dry_run)


def hold(app: Any, seconds: float, key: str = "", task: str = "") -> str:
    """Let no body start for so long, of one signature or of a whole task, for maintenance; running bodies go on.

    Newcomers are duplicates of a holder with the state `held`. A new hold replaces one of the same key or task. What waited
    in line before the hold starts up to its `lock_ttl`, at most a minute, after the end of the hold. The key of a slot stands
    for all slots of its signature. Returns the key under which `list` shows the hold.

    Raises:
        ConfigurationError: neither or both of key and task are given, or the time is not above 0, or above a year.
    """
    if not 0 < seconds <= LONGEST:
        raise ConfigurationError(f"a hold of {seconds:g} s must be above 0, and at most a year")
    base, name = _held(app, key, task)
    _reader(app).hold(base, name, seconds)
    return f"{base}:lock:{name}"


def unhold(app: Any, key: str = "", task: str = "") -> bool:
    """End a hold of an operator; return whether there was one.

    Raises:
        ConfigurationError: neither or both of key and task are given.
    """
    return _reader(app).unhold(*_held(app, key, task))


def _held(app: Any, key: str, task: str) -> tuple[str, str]:
    if bool(key) is bool(task):
        raise ConfigurationError("name either the key of a lock or a task")
    if task:
        return _base(app, task), WHOLE_TASK
    return _base_of(app, key), key.rpartition(":lock:")[2].partition(":")[0]


def _records(app: Any) -> RecordStore:
    if not context_of(app).settings.stats:
        raise ConfigurationError("no records of locks are kept, as singleton_lock_stats is off")
    return _reader(app)


def _reader(app: Any) -> RecordStore:
    """Return what reads the store; it knows locks by their keys, and holds, also where no records are kept."""
    return context_of(app).store.records()


def _tasks_key(app: Any) -> str:
    return f"{context_of(app).settings.prefix}:tasks"


def _base(app: Any, name: str) -> str:
    """Return what all keys of a task or group begin with."""
    return f"{context_of(app).settings.prefix}:{{{escaped(name)}}}"


def _base_of(app: Any, key: str) -> str:
    """Return what all keys of the task begin with whose lock has this key."""
    prefix = context_of(app).settings.prefix
    base, _, digest = key.rpartition(":lock:")
    if not (digest and base.startswith(f"{prefix}:{{") and base.endswith("}")):
        raise ConfigurationError(f"{key!r} is no key of a lock of this app: such a key begins with '{prefix}:{{'")
    return base
