"""Tells the main process of a prefork worker which calls to the store have failed in its children.

Without it the main process would not know: a child whose store is full can neither renew nor count there.
"""

from __future__ import annotations

import os
from typing import Any

from celery_singleton_lock.context import ProcessContext
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.native import start_native_thread

#: How many bytes of an error travel. A line must be shorter than what a pipe takes as a whole (PIPE_BUF).
_LONGEST_ERROR = 300


class FailureChannel:
    """A pipe from the children to their main process, made before the pool forks. A full one drops what does not fit.

    A child that was not forked (``worker_pool_start_method = "spawn"``) has none.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._outlet, self._inlet = os.pipe()
        os.set_blocking(self._inlet, False)
        context.children_forward = self.send

    def listen(self) -> None:
        """Have a thread count what comes, until the process ends."""
        start_native_thread(self._read)

    def send(self, name: str, error: StoreError | None) -> None:
        """Tell of what a child has counted."""
        kind = "" if error is None else "outage" if isinstance(error, StoreUnavailable) else "refusal"
        text = " ".join(str(error or "").split()).encode("utf-8", "replace")[:_LONGEST_ERROR]
        try:
            os.write(self._inlet, f"{name} {kind} ".encode() + text + b"\n")
        except OSError:  # it is full, or the main process has ended
            return

    def end(self) -> None:
        """End the thread once the children have ended. One that is forked from now on has no channel."""
        self._context.children_forward = None
        os.close(self._inlet)

    def _read(self) -> None:
        with open(self._outlet, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, kind, text = line.rstrip("\n").split(" ", 2)
                error: Any = {"outage": StoreUnavailable, "refusal": StoreError}.get(kind)
                self._context.outages.heard(name, error and error(text))
