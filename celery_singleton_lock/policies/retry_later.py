"""The policy that publishes the message of a duplicate again, with a growing delay."""

import math
import random
from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, Policy, RunLater

# Seconds. A shorter delay would only keep the broker busy; an ETA cannot express a much longer one.
_DELAYS = (0.01, 366 * 86400.0)
_RANGES = {
    "delay": _DELAYS,
    "backoff": (1.0, math.inf),
    "max_delay": _DELAYS,
    "jitter": (0.0, 1.0),
    "max_wait": (0.0, math.inf),
}


@dataclass(frozen=True)
class RetryLater(Policy):
    """Publish the task again until it acquires its lock.

    Arguments:
        delay: seconds before the first retry.
        backoff: factor by which the delay grows with each retry, at least 1.
        max_delay: longest delay in seconds.
        jitter: share of the delay, 0 to 1, by which it varies at random, so that many duplicates do not return together.
        max_wait: seconds of delay after which the task fails with `DuplicateTask`; ``math.inf`` means never.

    Raises:
        ConfigurationError: a value is out of range.
    """

    delay: float = 5.0
    backoff: float = 2.0
    max_delay: float = 60.0
    jitter: float = 0.2
    max_wait: float = 3600.0
    keeps_duplicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                bound = "a year" if most == _DELAYS[1] else f"{most:g}"
                raise ConfigurationError(f"RetryLater: {name}={value!r} must be a number from {least:g} to {bound}")
        if self.delay > self.max_delay:
            raise ConfigurationError(f"RetryLater: delay={self.delay:g} must not be above max_delay={self.max_delay:g}")

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.waited >= self.max_wait:
            return Fail()
        try:
            delay = min(self.delay * self.backoff**duplicate.times, self.max_delay)
        except OverflowError:
            delay = self.max_delay
        delay *= 1 + self.jitter * random.uniform(-1, 1)
        if duplicate.holder.state == "cooldown":  # a pause may end early
            delay = max(delay, duplicate.holder.remaining)
        return RunLater(min(delay, self.max_wait - duplicate.waited))
