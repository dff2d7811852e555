"""How often tasks with one lock key may be started: the value of the option `max_starts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from celery_singleton_lock.errors import ConfigurationError

_LONGEST = 366 * 86400.0  # seconds
#: Which starts count.
Count = Literal["crashed", "unsuccessful"]


@dataclass(frozen=True)
class MaxStarts:
    """Let a delivery fail with `TooManyStarts` if tasks with its lock key were started too often.

    Arguments:
        n: so many starts, at least 1; the next one is refused.
        per: seconds for which a start counts, from 1 to a year.
        count: ``"crashed"`` counts starts whose process died before it could release the lock; ``"unsuccessful"`` counts all
            starts since the last success.

    Raises:
        ConfigurationError: a value is out of range.
    """

    n: int
    per: float = 86400.0
    count: Count = "crashed"

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ConfigurationError(f"MaxStarts: n={self.n!r} must be a whole number from 1")
        if isinstance(self.per, bool) or not isinstance(self.per, (int, float)) or not 1 <= self.per <= _LONGEST:
            raise ConfigurationError(f"MaxStarts: per={self.per!r} must be a number of seconds, from 1 to a year")
        if self.count not in get_args(Count):
            raise ConfigurationError(
                f"MaxStarts: count={self.count!r} must be one of {', '.join(map(repr, get_args(Count)))}"
            )
