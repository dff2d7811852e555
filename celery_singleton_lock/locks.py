"""Locks as an operator sees them: which ones exist, what they did, and how to release one safely.

`celery singleton`, the exporter and the Django admin are clients of this module. No task module is needed; workers and the
broker only to release a lock. A key is what logs, errors, events and `lock_key_for()` show; `task` is the name of a task, or of
a `lock_group`.

All functions raise `ConfigurationError` if the app has no store, or one that keeps no records, if a key is none of this app, and
if a task is a member of a lock group, whose name it gives. They raise `StoreError` if the store is unreachable or refuses.
Records are kept while `singleton_lock_stats` is on.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.config.options import LONGEST
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.health import UNKNOWN, Bounds, Health, evaluate
from celery_singleton_lock.keys.canonical import escaped
from celery_singleton_lock.revoking import Release, answers_of, revoke
from celery_singleton_lock.store.records import SEPARATOR, WHOLE_TASK, Lock, RecordStore, Run, Statistics, task_of

_DIGEST = re.compile("[0-9a-f]{32}")
#: How many characters the author and the reason of a pause may have.
LONGEST_TEXT = 200
#: The end of a key: the digest of the arguments, and a slot with `lock_limit`; or what stands for a pause of the whole task.
_END_OF_KEY = re.compile(rf"[0-9a-f]{{32}}(:[1-9][0-9]*)?|{re.escape(WHOLE_TASK)}")

# -- what exists -------------------------------------------------------------------------------


def find(app: Any, task: str = "", node: str = "", min_age: float = 0.0) -> Sequence[Lock]:
    """Return operators' pauses, and then the other locks that exist, in no order.

    Arguments:
        task: only of this task or group.
        node: only held on this worker node.
        min_age: only held for at least so many seconds, and all operators' pauses.
    """
    records = _records(app)
    found = records.locks(*(_base(app, name) for name in _names(app, task)))
    chosen = [one for one in found if one.exists and _is_old(one, min_age) and node in ("", one.holder.node)]
    return sorted(chosen, key=lambda one: one.holder.state != "paused")


def _is_old(lock: Lock, min_age: float) -> bool:
    return lock.holder.age >= min_age or lock.holder.state == "paused"


def tasks(app: Any) -> Sequence[str]:
    """Return the names of tasks and groups that workers have had, or publishers a lock for, since the store has its data."""
    _records(app)
    return sorted(set(_groups(app).values()))


def show(app: Any, key: str) -> Sequence[Lock]:
    """Return the locks that keep a task with this key from starting: of all its holders, and operators' pauses.

    With the key of a slot, the holder of this slot alone. The digest of a key stands for the key. With the id of a task, the lock
    that this task holds; with the name of a task or group, all its locks.
    """
    if ":lock:" not in key:
        return _named(app, _given(key))
    base, digest = _checked(app, key)
    reader, store = _reader(app), context_of(app).store
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
    groups = _groups(app)
    if name in {*groups, *groups.values()}:
        return find(app, name)
    found = find(app)
    if of_task := [lock for lock in found if lock.holder.task_id == name]:
        return of_task
    if is_digest(name):
        parts = (_parts(app, lock.key) for lock in found)
        keys = {f"{base}:lock:{digest}" for base, digest in parts if digest == name.removeprefix("lock:")}
        return [lock for key in sorted(keys) for lock in show(app, key)]
    return find(app, name)  # a name that no worker has registered


def is_digest(name: str) -> bool:
    """Tell whether this is the digest of a key, which its end is."""
    return bool(_DIGEST.fullmatch(name.removeprefix("lock:")))


# -- what they did -----------------------------------------------------------------------------


def stats(app: Any, task: str = "") -> Sequence[Statistics]:
    """Return the counters of each task, or of one, and how many of its locks exist now.

    The names of counters, with labels after a colon:

    * `acquired`, `reacquired`, `expired`, `released_by_operator`, and `released:` with `success`, `failure`, `retry`, `other`, or
      `started` (``lock_until="start"``: the end of the body is not seen). While the store loses nothing, acquired + reacquired =
      released + expired + released_by_operator + what exists now (`Statistics.held`).
    * `duplicates:` with the policy's name, `callable` or `custom`: messages that found the lock held, each counted once.
      `redelivery_checks`: deliveries of a message that another delivery runs. `starts_refused`: by `max_starts`.
    * `lost:` with `expired`, `not_owner`, `released_by_operator` or `lock_at_most`; `renewals`, `renewal_failures`,
      `store_errors:` with the verb: counted by the processes of bodies, which report all of it when they lose a lock of the task,
      or next acquire one.
    * `hold:` and `wait:` with an upper bound in seconds: how many leases were held, and how many messages waited, at most so
      long, and longer than the bound before; `hold_ms` and `wait_ms`: the sums, in milliseconds.
    * `last_start`, `last_success`: when, in milliseconds since 1970.
    """
    records, names = _records(app), _names(app, task)
    found = records.recorded(*(_base(app, name) for name in names))
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
    records = _records(app)
    key = task if "}:lock:" in task else ""
    base = _checked(app, key)[0] if key else _base(app, *_names(app, _given(task)))
    records.sweep(base)
    return [run for run in records.history(base) if not key or f"{run.key}:".startswith(f"{key}:")]


def check(
    app: Any,
    tasks: Sequence[str] = (),
    max_age: float | None = None,
    max_blocked: float | None = None,
    max_lost: float | None = None,
    no_success_for: float | None = None,
) -> Health:
    """Compare what `stats` tells with bounds, and try whether the store takes writes, as `check` does; times are in seconds.

    Arguments:
        tasks: only these tasks or groups, which must have succeeded if `no_success_for` is given.
        max_age: how long a body may hold a lock.
        max_blocked: how many duplicates a holder may meet.
        max_lost: how many locks may have been lost since the store has its data.
        no_success_for: how long a task that has started may go without success.
    """
    known = _groups(app).values()
    found = [one for name in tasks or ("",) for one in stats(app, name)]
    refusal = ""
    try:
        probe(app)
    except StoreError as error:
        refusal = str(error)
    missing = [] if no_success_for is not None else [name for name in tasks if name not in known]
    if (missing or not found) and not refusal:
        return Health(UNKNOWN, f"no worker has registered {', '.join(missing) or 'a task'} in this store")
    bounds, now = Bounds(max_age, max_blocked, max_lost, no_success_for), time.time()
    return evaluate(found, bounds, tasks, now, refusal, now - (math.inf if no_success_for is None else _uptime(app)))


def _uptime(app: Any) -> float:
    """Return for how many seconds the server of the store has been up; infinity if it does not tell."""
    with suppress(StoreError, KeyError):  # some services, and some logins, have no INFO
        return float(server(app)["uptime_in_seconds"])
    return math.inf


def probe(app: Any) -> None:
    """Raise `StoreError` if the store takes no writes, as one that is full, or a replica: no lock can be acquired there.

    It writes a key of its own, which expires.
    """
    context = context_of(app)
    context.store.check(f"{context.settings.prefix}:{{}}")


def server(app: Any) -> Mapping[str, str]:
    """Return what the server of the store says of itself (INFO)."""
    return _reader(app).server()


# -- what an operator does ---------------------------------------------------------------------


def release(
    app: Any, key: str, force: bool = False, dry_run: bool = False, timeout: float = 1.0, task_id: str = ""
) -> Release:
    """Release a lock whose body does not run any more. Its holder, if it runs after all, is told that the lease is lost.

    The node of the holder is asked whether it runs the task. If it does, or does not answer, only `force` releases the lock.

    Arguments:
        force: release it whatever the node says. Another body may then start while the first one runs.
        dry_run: only ask.
        timeout: seconds in which the node must answer.
        task_id: release it only if this task holds it.

    Returns what became of it; if nobody held it, also what else keeps a task with this key from starting.
    """
    base, _ = _checked(app, key)
    found = context_of(app).store.holder(key)
    if found is None:
        return Release("free", key, others=show(app, key))
    if task_id not in ("", found.task_id):
        return Release("changed", key, found)
    (answer,) = answers_of(app, [found], timeout)
    return revoke(context_of(app).store, base, Release("", key, found, answer), force, dry_run)


def release_all(
    app: Any,
    task: str = "",
    node: str = "",
    force: bool = False,
    dry_run: bool = False,
    timeout: float = 1.0,
    told: Callable[[Release], object] = lambda one: None,
) -> Sequence[Release]:
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
        asked = Release("", lock.key, lock.holder, answer)
        done.append(revoke(store, _parts(app, lock.key)[0], asked, force, dry_run))
        told(done[-1])
    return done


def pause(app: Any, seconds: float, key: str = "", task: str = "", reason: str = "", by: str = "") -> str:
    """Let no body start for so long, with one lock key or of a whole task, for maintenance; running bodies go on.

    Newcomers are duplicates of a holder with the state `paused`. A new pause replaces one of the same key or task. What waited
    in line before the pause starts up to its `lock_ttl`, at most a minute, after the end of the pause. The key of a slot stands
    for all slots of its lock. Returns the key under which `find` shows the pause.

    Arguments:
        reason: why; others are shown it.
        by: who pauses it; the user and the host of this process, if nobody is named.

    Raises:
        ConfigurationError: neither or both of key and task are given, no worker has registered the task, the time is not above 0,
            or above a year, or a text has more than 200 characters.
    """
    if not 0 < seconds <= LONGEST:
        longest = duration_text(LONGEST)
        raise ConfigurationError(f"a pause of {duration_text(seconds)} must be longer than 0, and at most {longest}")
    for what, text in (("reason", reason), ("author", by)):
        if len(text) > LONGEST_TEXT or SEPARATOR in text:
            raise ConfigurationError(f"the {what} of a pause has more than {LONGEST_TEXT} characters, or U+001F")
    base, name = _paused(app, key, task)
    if (owner := task_of(base)) not in _groups(app).values():
        _reader(app).add_tasks(_tasks_key(app), {owner: owner})  # so that `find` shows the pause
    _reader(app).pause(base, name, seconds, by or this_user(), reason)
    return f"{base}:lock:{name}"


def this_user() -> str:
    """Return the user and the host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may not know the name of its user
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def resume(app: Any, key: str = "", task: str = "") -> bool:
    """End a pause; return whether there was one.

    Raises:
        ConfigurationError: neither or both of key and task are given, or no worker has registered the task.
    """
    return _reader(app).resume(*_paused(app, key, task))


def _paused(app: Any, key: str, task: str) -> tuple[str, str]:
    if bool(key) is bool(task):
        raise ConfigurationError("name either the key of a lock or a task")
    if key:
        return _checked(app, key)
    (name,) = _names(app, task)
    if name not in _groups(app).values():
        raise ConfigurationError(f"no worker has registered a task or lock group {task!r} in this store")
    return _base(app, name), WHOLE_TASK


def _records(app: Any) -> RecordStore:
    if not context_of(app).settings.stats:
        raise ConfigurationError("no records of locks are kept, as singleton_lock_stats is off")
    return _reader(app)


def _reader(app: Any) -> RecordStore:
    """Return what reads the store; it knows locks by their keys, pauses and names of tasks, also where no records are kept."""
    return context_of(app).store.records()


def _given(name: str) -> str:
    if not name:
        raise ConfigurationError("no name, id or key is given")
    return name


def _names(app: Any, task: str) -> Sequence[str]:
    """Return this name of a task or group, or all names if it is empty."""
    groups = _groups(app)
    if not task:
        return sorted(set(groups.values()))
    if groups.get(task, task) != task and task not in groups.values():
        raise ConfigurationError(f"task {task!r} has its locks in a lock group: name {groups[task]!r} instead")
    return [task]


def _groups(app: Any) -> Mapping[str, str]:
    """Return the names of tasks that workers or publishers have registered, each with the name that its locks have."""
    return _reader(app).tasks(_tasks_key(app))


def _tasks_key(app: Any) -> str:
    return f"{context_of(app).settings.prefix}:tasks"


def _base(app: Any, name: str) -> str:
    """Return what all keys of a task or group begin with."""
    return f"{context_of(app).settings.prefix}:{{{escaped(name)}}}"


def _checked(app: Any, key: str) -> tuple[str, str]:
    """Return the parts of a key, unless its task has its locks in a lock group."""
    parts = _parts(app, key)
    _names(app, task_of(parts[0]))
    return parts


def _parts(app: Any, key: str) -> tuple[str, str]:
    """Return what all keys of the lock's task begin with, and the digest in the lock key, or `WHOLE_TASK`."""
    prefix = context_of(app).settings.prefix
    base, _, rest = key.rpartition(":lock:")
    if not (_END_OF_KEY.fullmatch(rest) and base.startswith(f"{prefix}:{{") and base.endswith("}")):
        raise ConfigurationError(
            f"{key!r} is no key of a lock of this app: such a key is '{prefix}:{{TASK}}:lock:' and 32 hexadecimal digits, "
            "and may end with ':' and the number of a slot"
        )
    return base, rest.partition(":")[0]
