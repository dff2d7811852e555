"""Celery tasks that never run twice at once: a renewed Redis lease around each body."""

from celery_singleton_lock import signals
from celery_singleton_lock.errors import (
    ConfigurationError,
    DuplicateTask,
    LockKeyError,
    LockLost,
    SingletonError,
    StoreError,
    StoreUnavailable,
    TooManyStarts,
)
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.policies import Debounce, Join, Policy, Raise, Replace, RetryLater, RunOnceMore, Skip, Wait
from celery_singleton_lock.result import SingletonResult
from celery_singleton_lock.task import SingletonMixin, SingletonTask

__version__ = "1.0.0rc1"

__all__ = [
    "ConfigurationError",
    "Debounce",
    "DuplicateTask",
    "Holder",
    "Join",
    "Lease",
    "LockKeyError",
    "LockLost",
    "MaxStarts",
    "Policy",
    "Raise",
    "Replace",
    "RetryLater",
    "RunOnceMore",
    "SingletonError",
    "SingletonMixin",
    "SingletonResult",
    "SingletonTask",
    "Skip",
    "StoreError",
    "StoreUnavailable",
    "TooManyStarts",
    "Wait",
    "signals",
]
