"""The exceptions of this library. They survive pickle and JSON result backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_singleton_lock.holder import Holder


class SingletonError(Exception):
    """The base of all errors of this library."""


class ConfigurationError(SingletonError):
    """Options or settings cannot be used. The text names task, option and value, and has a line for each `problem`.

    Arguments:
        problems: what is wrong, each in one line.
    """

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems, each in one line."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.problems)


class LockKeyError(SingletonError):
    """An argument cannot be part of a lock key. The text names the parameter, never its value."""


class DuplicateTask(SingletonError):
    """Another task holds the lock.

    Arguments:
        key: the lock key.
        holder: who holds it: a `Holder`, or its fields as a JSON result backend returns them.
    """

    def __init__(self, key: str = "", holder: Holder | Mapping[str, Any] | None = None) -> None:
        self.holder = holder if isinstance(holder, Holder) else Holder(**(holder or {}))
        self.key = key
        super().__init__(key, self.holder.as_dict())

    def __str__(self) -> str:
        return f"{self.key} is held by {self.holder}"


class LockLost(SingletonError):
    """The lease was lost while its task was still running."""

    @property
    def key(self) -> str:
        """The lock key, or an empty text if it is not known."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"the lock {self.key} was lost while its task was running"


class TooManyStarts(SingletonError):
    """Tasks with this lock key were started too often: see `MaxStarts`.

    Arguments:
        key: the lock key.
        starts: how many starts are allowed.
        count: which starts were counted: ``"crashed"`` or ``"unsuccessful"``.
    """

    def __init__(self, key: str = "", starts: int = 0, count: str = "crashed") -> None:
        self.key = key
        self.starts = starts
        self.count = count
        super().__init__(key, starts, count)

    def __str__(self) -> str:
        return f"{self.key} is not started again: {self.starts} {self.count} starts"


class StoreError(SingletonError):
    """The store refused a call: a login or permission that it never accepted, or a key of another type."""


class StoreUnavailable(StoreError):
    """The store is unreachable, did not answer in time, cannot serve now, or refuses what it accepted before."""
