"""The command `celery -A app singleton`. Celery imports this package at every call of `celery`, so it imports little.

A module adds its commands to the group when it is imported here.
"""

from celery_singleton_lock.cli import changing, check, exporter, reading, watch  # noqa: F401 - they add their commands
from celery_singleton_lock.cli.group import singleton
from celery_singleton_lock.worker import control  # noqa: F401 - registers its command, so that `celery inspect` knows it

__all__ = ["singleton"]
