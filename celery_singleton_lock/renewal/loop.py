"""A background thread that sleeps until something is due, and survives every error."""

from __future__ import annotations

import math
from collections.abc import Callable

from celery_singleton_lock.clock import now
from celery_singleton_lock.native import CollectorPause, NativeEvent, native_lock, start_native_thread

ERROR_DELAY = 0.1  # seconds from an error to the next step


class BackgroundLoop:
    """Runs a step whenever it is due, in a native daemon thread that starts at the first `wake`.

    The step returns when it is due next, as a time of the clock, or infinity: not before `wake`. Its errors go to `on_error`.
    """

    def __init__(
        self, step: Callable[[], float], on_error: Callable[[BaseException], object], clock: Callable[[], float] = now
    ) -> None:
        self._step = step
        self._on_error = on_error
        self._clock = clock
        self._pause = CollectorPause()
        self._wakeup = NativeEvent(self._pause)
        self._mutex = native_lock()
        self._started = self._ended = False
        self._next = math.inf

    def wake(self, at: float) -> None:
        """Make sure that the next step comes no later than at this time; it may come at once."""
        if at >= self._next:
            return
        with self._mutex:
            if self._ended:
                return
            if not self._started:
                start_native_thread(self._run)
                self._started = True
        self._next = at
        self._wakeup.set()

    def end(self) -> None:
        """End the thread for good, after the step that it may be running."""
        with self._mutex:
            self._ended = True
        self._wakeup.set()

    def _run(self) -> None:
        self._pause.begin()
        try:
            self._run_until_ended()
        finally:
            self._pause.end()

    def _run_until_ended(self) -> None:
        while not self._ended:
            try:
                self.run_once()
            except BaseException as error:
                self._next = 0.0  # in case that the next lines fail as well, for lack of memory, say
                try:
                    self._next = self._clock() + ERROR_DELAY
                    self._on_error(error)
                except BaseException:
                    pass

    def run_once(self) -> None:
        """Wait until a step is due, and run it."""
        while (left := self._next - self._clock()) > 0:
            # At most a second: the wait does not count the time that a machine is suspended.
            if self._wakeup.wait(None if left == math.inf else min(left, 1.0)):
                break
        if self._ended:
            return
        self._next = math.inf  # a `wake` during the step counts
        self._next = min(self._next, self._step())
