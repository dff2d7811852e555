"""The policy that lets a duplicate run in place of the holder."""

import math
from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Fail, Policy, SkipRun
from celery_singleton_lock.policies.retry_later import RetryLater

#: Seconds by which a copy comes late rather than early: it is published before the holder is asked.
_MARGIN = 0.1


@dataclass(frozen=True)
class Replace(Policy):
    """Ask the holder to stop, and run once it has ended, never before. Of several duplicates the latest runs.

    Arguments:
        grace: seconds after which a holder that goes on is terminated, where its pool can do that; ``math.inf`` means never.
        max_wait: seconds after which a message that waits fails with `DuplicateTask`; ``math.inf`` means never.

    Raises:
        ConfigurationError: a value is out of range.
    """

    grace: float = 10.0
    max_wait: float = 3600.0
    uses_line: ClassVar[bool] = True
    stops_holder: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("grace", "max_wait"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= math.inf:
                raise ConfigurationError(f"Replace: {name}={value!r} must be a number of seconds from 0")

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.own_retry:
            return RetryLater().decide(duplicate)
        if duplicate.waiting and duplicate.has_waited and not duplicate.is_waiting:
            return SkipRun(pending=duplicate.head)
        left, of_grace = self.max_wait - duplicate.waited, self.grace - duplicate.asked
        if left <= 0:
            return Fail()
        is_over = of_grace <= 0 and duplicate.holder.state == "running"
        # A message that has lost its place is no newcomer: it takes no other's place when it joins again.
        is_newcomer = not duplicate.has_waited
        within = min(left, of_grace + _MARGIN) if of_grace > 0 else left
        return Enqueue(1, is_newcomer, stop=True, within=within, terminate=is_over, gives_way=True)
