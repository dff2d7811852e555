"""The names of the keys of a store, how long what is in them lives, and the tokens that are no secret.

`base` is what all keys of a task name, or of a lock group, start with; the names that each run needs are made once for it.
"""

from __future__ import annotations

from functools import cache

#: How long a store remembers that a delivery succeeded while a redelivery of its message waited, in seconds.
COMPLETED_TTL = 3600.0
#: How long a store remembers that another task goes on with the id of one whose body has ended, in seconds.
CONTINUED_TTL = 3600.0
#: How long late copies of a message that waited in line are dropped, in seconds.
COPY_TTL = 3600.0
#: How long a store remembers at least that a lock was revoked from a delivery, in seconds.
REVOKED_TTL = 3600.0
#: How long a store remembers that a body began which has not ended, in seconds. Its message is delivered again before that.
BEGUN_TTL = 7 * 86400.0
#: How long a store keeps what a check has written, in seconds.
CHECK_TTL = 5.0


def starts_key(base: str, digest: str) -> str:
    """Return the key of a lock key's starts that count for `max_starts`."""
    return f"{base}:starts:{digest}"


@cache
def task_keys(base: str) -> tuple[str, str, str]:
    """Return the keys that a task name has once: of its last fence, its recent grants and its revoked tokens."""
    return f"{base}:fence", f"{base}:recent", f"{base}:revoked"


@cache
def record_keys(base: str) -> tuple[str, str, str]:
    """Return the keys of a task name's records: the leases that exist, the counters, and the last runs."""
    return f"{base}:registry", f"{base}:stats", f"{base}:history"


def check_key(base: str) -> str:
    """Return the key that a check of the store writes."""
    return f"{base}:check"


@cache
def pauses_key(base: str) -> str:
    """Return the key of operators' pauses."""
    return f"{base}:pauses"


def primary_key(base: str) -> str:
    """Return the key of the note which server has a task name's locks, and since when."""
    return f"{base}:primary"


def line_keys(base: str, digest: str) -> tuple[str, str, str]:
    """Return the keys of a lock's line: the tickets in order, their messages, and the task name's used tickets."""
    return f"{base}:line:{digest}", f"{base}:waiting:{digest}", f"{base}:used"


def begun_key(base: str) -> str:
    """Return the key of the messages of a task name whose bodies began, and have not ended."""
    return f"{base}:begun"


def replaced_key(base: str) -> str:
    """Return the key of the messages of a task name that were replaced by others."""
    return f"{base}:replaced"


#: Token of a lock that is reserved for the head of its line.
LINE_TOKEN = "queued:line"


def queued_token(task_id: str) -> str:
    """Return the token of a message's reservation, which any delivery of the message may turn into its lease: it is no secret."""
    return f"queued:{task_id}"
