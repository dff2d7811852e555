"""What this process counts of each task name, for the statistics: renewals, lost leases, failed calls. Scripts count the rest.

A thread writes the sums to the store some seconds after the first of them. A worker's processes write them at their end, too; one
that is killed does not report its last seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from celery_singleton_lock.native import native_lock


class Tally:
    """Counters of one process: for each task name, by the field of the statistics. Any thread may use it.

    Arguments:
        on_first: called with the first number after a `take`.
    """

    def __init__(self, on_first: Callable[[], object] = lambda: None) -> None:
        self._counted: dict[str, Counter[str]] = {}
        self._mutex = native_lock()
        self._on_first = on_first

    def count(self, base: str, name: str, number: int = 1) -> None:
        """Count something of the task whose keys start with `base`."""
        self.add(base, {name: number})

    def add(self, base: str, counted: Mapping[str, int]) -> None:
        """Count several things."""
        with self._mutex:
            is_first = not self._counted
            self._counted.setdefault(base, Counter()).update(counted)
        if is_first:
            self._on_first()

    def take(self) -> Mapping[str, Mapping[str, int]]:
        """Return what was counted since the last time."""
        with self._mutex:
            taken, self._counted = self._counted, {}
        return taken
