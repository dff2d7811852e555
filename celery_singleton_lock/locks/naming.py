"""The store of an app, and what an operator names in it: tasks, lock groups, lock keys and their digests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.keys.canonical import escaped
from celery_singleton_lock.store.records import WHOLE_TASK, RecordStore, task_of

_DIGEST = re.compile("[0-9a-f]{32}")
#: The end of a key: the digest of the arguments, and a slot with `lock_limit`; or what stands for a pause of the whole task.
_END_OF_KEY = re.compile(rf"[0-9a-f]{{32}}(:[1-9][0-9]*)?|{re.escape(WHOLE_TASK)}")


def records_of(app: Any) -> RecordStore:
    if not context_of(app).settings.stats:
        raise ConfigurationError("no records of locks are kept, as singleton_lock_stats is off")
    return reader_of(app)


def reader_of(app: Any) -> RecordStore:
    """Return what reads the store; it knows locks by their keys, pauses and names of tasks, also where no records are kept."""
    return context_of(app).store.records()


def given(name: str) -> str:
    if not name:
        raise ConfigurationError("no name, id or key is given")
    return name


def names_of(app: Any, task: str) -> Sequence[str]:
    """Return this name of a task or group, or all names if it is empty."""
    groups = groups_of(app)
    if not task:
        return sorted(set(groups.values()))
    if groups.get(task, task) != task and task not in groups.values():
        raise ConfigurationError(f"task {task!r} has its locks in a lock group: name {groups[task]!r} instead")
    return [task]


def groups_of(app: Any) -> Mapping[str, str]:
    """Return the names of tasks that workers or publishers have registered, each with the name that its locks have."""
    return reader_of(app).tasks(tasks_key(app))


def tasks_key(app: Any) -> str:
    return f"{context_of(app).settings.prefix}:tasks"


def base_of(app: Any, name: str) -> str:
    """Return what all keys of a task or group begin with."""
    return f"{context_of(app).settings.prefix}:{{{escaped(name)}}}"


def checked(app: Any, key: str) -> tuple[str, str]:
    """Return the parts of a key, unless its task has its locks in a lock group."""
    parts = parts_of(app, key)
    names_of(app, task_of(parts[0]))
    return parts


def parts_of(app: Any, key: str) -> tuple[str, str]:
    """Return what all keys of the lock's task begin with, and the digest in the lock key, or `WHOLE_TASK`."""
    prefix = context_of(app).settings.prefix
    base, _, rest = key.rpartition(":lock:")
    if not (_END_OF_KEY.fullmatch(rest) and base.startswith(f"{prefix}:{{") and base.endswith("}")):
        raise ConfigurationError(
            f"{key!r} is no key of a lock of this app: such a key is '{prefix}:{{TASK}}:lock:' and 32 hexadecimal digits, "
            "and may end with ':' and the number of a slot"
        )
    return base, rest.partition(":")[0]


def is_digest(name: str) -> bool:
    """Tell whether this is the digest of a key, which its end is."""
    return bool(_DIGEST.fullmatch(name.removeprefix("lock:")))
