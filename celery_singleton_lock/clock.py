"""The clock that deadlines are counted on, and durations as people read them."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: also counts the time that the machine was suspended

    def now() -> float:
        """Return the seconds of a clock that nobody can set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover
    now = time.monotonic

#: Seconds of the units in which people write durations.
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_text(seconds: float) -> str:
    """Return a duration with its two highest units, such as `1h30m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    left = round(seconds)
    for unit, lower in (("d", "h"), ("h", "m"), ("m", "s")):
        if left >= UNITS[unit]:
            count, rest = divmod(left, UNITS[unit])
            more = rest // UNITS[lower]
            return f"{count}{unit}" + (f"{more}{lower}" if more else "")
    return f"{left}s"
