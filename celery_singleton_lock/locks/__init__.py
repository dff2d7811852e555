"""Locks as an operator sees them: which ones exist, what they did, and how to release one safely.

`celery singleton`, the exporter and the Django admin are clients of this module. No task module is needed; workers and the
broker only to release a lock. A key is what logs, errors, events and `lock_key_for()` show; `task` is the name of a task, or of
a `lock_group`.

All functions raise `ConfigurationError` if the app has no store, or one that keeps no records, and if a key is none of this app.
So they do for a task of a lock group: the error names the group. They raise `StoreError` if the store is unreachable or refuses.
Records are kept while `singleton_lock_stats` is on.
"""

from celery_singleton_lock.locks.checking import check, probe, server
from celery_singleton_lock.locks.pausing import pause, resume, this_user
from celery_singleton_lock.locks.reading import find, history, show, stats, tasks
from celery_singleton_lock.locks.releasing import ReleaseReport, release, release_all

__all__ = [
    "ReleaseReport",
    "check",
    "find",
    "history",
    "pause",
    "probe",
    "release",
    "release_all",
    "resume",
    "server",
    "show",
    "stats",
    "tasks",
    "this_user",
]
