"""The clock that deadlines are counted on."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: also counts the time that the machine was suspended

    def now() -> float:
        """Return the seconds of a clock that nobody can set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover
    now = time.monotonic
