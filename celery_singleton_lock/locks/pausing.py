"""Pauses by operators: no body starts meanwhile."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Any

from celery_singleton_lock.clock import duration_text
from celery_singleton_lock.config.options import LONGEST
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.locks.naming import base_of, checked, groups_of, names_of, reader_of, tasks_key
from celery_singleton_lock.store.records import SEPARATOR, WHOLE_TASK, task_of

#: How many characters the author and the reason of a pause may have.
LONGEST_TEXT = 200


def pause(app: Any, seconds: float, key: str = "", task: str = "", reason: str = "", by: str = "") -> str:
    """Let no body start for so long, with one lock key or of a whole task, for maintenance; running bodies go on.

    Newcomers are duplicates of a holder with the state `paused`. A new pause replaces one of the same key or task. What waited
    in line before the pause starts up to its `lock_ttl`, at most a minute, after the end of the pause. The key of a slot stands
    for all slots of its lock. Returns the key under which `find` shows the pause.

    Arguments:
        reason: why; others are shown it.
        by: who pauses it; the user and the host of this process, if nobody is named.

    Raises:
        ConfigurationError: neither or both of key and task are given, or no worker has registered the task. Or the time is not
            above 0, or above a year, or a text has more than 200 characters.
    """
    if not 0 < seconds <= LONGEST:
        longest = duration_text(LONGEST)
        raise ConfigurationError(f"a pause of {duration_text(seconds)} must be longer than 0, and at most {longest}")
    for what, text in (("reason", reason), ("author", by)):
        if len(text) > LONGEST_TEXT or SEPARATOR in text:
            raise ConfigurationError(f"the {what} of a pause has more than {LONGEST_TEXT} characters, or U+001F")
    base, name = _paused(app, key, task)
    if (owner := task_of(base)) not in groups_of(app).values():
        reader_of(app).add_tasks(tasks_key(app), {owner: owner})  # so that `find` shows the pause
    reader_of(app).pause(base, name, seconds, by or this_user(), reason)
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
    return reader_of(app).resume(*_paused(app, key, task))


def _paused(app: Any, key: str, task: str) -> tuple[str, str]:
    if bool(key) is bool(task):
        raise ConfigurationError("name either the key of a lock or a task")
    if key:
        return checked(app, key)
    (name,) = names_of(app, task)
    if name not in groups_of(app).values():
        raise ConfigurationError(f"no worker has registered a task or lock group {task!r} in this store")
    return base_of(app, name), WHOLE_TASK
