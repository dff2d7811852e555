"""What can go wrong, as exceptions that survive pickle and JSON result backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from click import ClickException

from celery_singleton_lock.holder import Holder


class SingletonError(Exception):
    """Base of every error of this library."""


class ConfigurationError(SingletonError, ClickException):
    """An option or setting cannot be used; the text names task, option and value.

    The `celery` command shows it as one line and exits with 1, as it does with every `ClickException`.
    """


class SignatureError(SingletonError):
    """An argument has no stable form to make a key of; names the parameter, never its value."""


class DuplicateTask(SingletonError):
    """The signature is held by other work.

    Arguments:
        key: the lock key.
        holder: who has it, a `Holder` or its fields (as a JSON result backend gives them back).
    """

    def __init__(self, key: str = "", holder: Holder | Mapping[str, Any] | None = None) -> None:
        self.holder = holder if isinstance(holder, Holder) else Holder(**(holder or {}))
        self.key = key
        super().__init__(key, self.holder.as_dict())

    def __str__(self) -> str:
        return f"{self.key} is held by {self.holder}"


class LockLost(SingletonError):
    """The lease ended while its work still went on."""

    @property
    def key(self) -> str:
        """The lock key, empty where it is not known."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"the lock {self.key} was lost while its task went on"


class StoreError(SingletonError):
    """The store refused: wrong login, missing permission, a key of another type."""


class StoreUnavailable(StoreError):
    """The store could not be reached, or did not answer in time."""
