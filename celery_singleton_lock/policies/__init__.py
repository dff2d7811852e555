"""Policies: what becomes of a duplicate. They only decide; `celery_singleton_lock.worker.outcome` acts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, TypeAlias

from celery_singleton_lock.errors import ConfigurationError

_LEAST_DELAY = 0.01  # seconds; a shorter one would keep the broker busy and nothing else
_LONGEST_DELAY = 366 * 86400.0  # a year, which an ETA can still express


@dataclass(frozen=True)
class Skip:
    """Do not run; the task counts as done.

    Arguments:
        result: what the task's result is then.
    """

    result: Any = None


@dataclass(frozen=True)
class RetryLater:
    """Publish the task again, to run when the signature is free.

    Arguments:
        delay: seconds before the first new look.
        backoff: factor by which the delay grows with each look, at least 1.
        max_delay: longest delay in seconds.
        jitter: share of the delay, 0 to 1, by which it is varied at random, so that many duplicates do not return together.
        max_wait: seconds of delay after which the task fails with `DuplicateTask`; ``math.inf``: it waits for ever.

    Raises:
        ConfigurationError: a value is out of range.
    """

    delay: float = 5.0
    backoff: float = 2.0
    max_delay: float = 60.0
    jitter: float = 0.2
    max_wait: float = 3600.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("delay", _LEAST_DELAY, _LONGEST_DELAY),
            ("backoff", 1.0, math.inf),
            ("max_delay", _LEAST_DELAY, _LONGEST_DELAY),
            ("jitter", 0.0, 1.0),
            ("max_wait", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                bound = "a year" if most == _LONGEST_DELAY else f"{most:g}"
                raise ConfigurationError(f"RetryLater: {name}={value!r} must be a number from {least:g} to {bound}")
        if self.delay > self.max_delay:
            raise ConfigurationError(f"RetryLater: delay={self.delay:g} must not be above max_delay={self.max_delay:g}")

    def delay_for(self, times: int, waited: float) -> float:
        """Seconds to wait after `times` earlier looks and `waited` seconds, never past `max_wait`."""
        try:
            delay = min(self.delay * self.backoff**times, self.max_delay)
        except OverflowError:
            delay = self.max_delay
        delay *= 1 + self.jitter * random.uniform(-1, 1)
        return min(delay, self.max_wait - waited)


@dataclass(frozen=True)
class Raise:
    """Fail with `DuplicateTask`."""


Policy: TypeAlias = Skip | RetryLater | Raise

_NAMED: dict[str, Policy] = {"skip": Skip(), "retry": RetryLater(), "raise": Raise()}


def as_policy(value: object) -> Policy | None:
    """The policy that a name or a policy object stands for, or None."""
    if isinstance(value, (Skip, RetryLater, Raise)):
        return value
    return _NAMED.get(value) if isinstance(value, str) else None
