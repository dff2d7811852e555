"""Collects what is wrong with options and settings, so that all of it is reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from celery_singleton_lock.errors import ConfigurationError


class Problems:
    """Keeps each refusal of the blocks that it wraps (``with problems: …``), so that the code after them goes on."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}  # a set in order: a wrong setting is found with each task

    def __enter__(self) -> None:
        pass

    def __exit__(self, cls: object, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, ConfigurationError):
            return False
        self.add(error.problems)
        return True

    @property
    def found(self) -> tuple[str, ...]:
        """The problems that were collected."""
        return tuple(self._found)

    def add(self, problems: Iterable[str]) -> None:
        """Add problems, each a text of one line."""
        self._found.update(dict.fromkeys(problems))

    def refuse(self) -> None:
        """Raise what was collected.

        Raises:
            ConfigurationError: there is a problem.
        """
        if self._found:
            raise ConfigurationError(*self._found)
