"""Whether a store has accepted this process, and refuses it now."""

from __future__ import annotations

import math
from collections.abc import Callable

from celery_singleton_lock.clock import now
from celery_singleton_lock.errors import StoreError, StoreUnavailable


class Access:
    """Tells a refusal that will end, as while a password changes, from one that will not, as of a wrong password.

    The stores of one process share it. A forked process begins with what its parent knew.

    Arguments:
        on_refused: is called with the error when a store that has accepted this process begins to refuse it; at most once a
            minute, as a refusal may be heard of after a later call that was accepted, in another thread.
    """

    def __init__(
        self, on_refused: Callable[[StoreError], object] = lambda error: None, clock: Callable[[], float] = now
    ) -> None:
        self.has_worked = False
        self._on_refused, self._clock = on_refused, clock
        self._is_refused = False  # so that each such time is reported once
        self._silent_until = -math.inf

    def accepted(self) -> None:
        """Note that the store has done what a task needs."""
        self.has_worked, self._is_refused = True, False

    def refused(self, text: str) -> StoreError:
        """Return the error of a login, a permission or a server that was refused."""
        if not self.has_worked:
            return StoreError(text)
        error = StoreUnavailable(f"{text} (before, it was accepted)")
        if not self._is_refused and self._clock() >= self._silent_until:
            self._is_refused = True
            self._silent_until = self._clock() + 60.0
            self._on_refused(error)
        return error
