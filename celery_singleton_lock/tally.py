"""What this process counts of each task name, for the statistics. Its next acquire for that task takes it to the store.

A process that has lost a lock reports at once. So one that dies, or does not run the task again, may not report its last renewals
and failed calls. Scripts count the rest themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from celery_singleton_lock.native import native_lock


class Tally:
    """Counters of one process: for each task name, by the field of the statistics. Any thread may use it."""

    def __init__(self) -> None:
        self._counted: dict[str, Counter[str]] = {}
        self._mutex = native_lock()

    def count(self, base: str, name: str, number: int = 1) -> None:
        """Count something of the task whose keys start with `base`."""
        with self._mutex:
            self._counted.setdefault(base, Counter())[name] += number

    def take(self, base: str) -> Mapping[str, int]:
        """Return what was counted since the last time."""
        if base not in self._counted:
            return {}
        with self._mutex:
            return self._counted.pop(base, {})

    def put_back(self, base: str, counted: Mapping[str, int]) -> None:
        """Count again what could not be taken to the store."""
        for name, number in counted.items():
            self.count(base, name, number)
