"""The policy that lets a duplicate end as its holder ends."""

import math
from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, Follow, Policy
from celery_singleton_lock.policies.retry_later import RetryLater

#: Shortest and longest delay between two looks at the holder, in seconds.
_SHORTEST, _LONGEST = 0.2, 5.0


@dataclass(frozen=True)
class Join(Policy):
    """Do not run; end with the holder's result, or with its error. A task's own retry is postponed as by `RetryLater()` instead.

    Arguments:
        max_wait: seconds of delay after which the task fails with `DuplicateTask`; ``math.inf`` means never.

    Raises:
        ConfigurationError: `max_wait` is out of range.
    """

    max_wait: float = 3600.0
    needs_same_work: ClassVar[bool] = True
    reads_result: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.max_wait, (int, float)) and not isinstance(self.max_wait, bool)
        if not is_number or not 0 <= self.max_wait <= math.inf:
            raise ConfigurationError(f"Join: max_wait={self.max_wait!r} must be a number of seconds from 0")

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.own_retry:
            return RetryLater().decide(duplicate)
        if duplicate.holder.state == "paused":  # there is nobody to follow
            return RetryLater(max_wait=self.max_wait).decide(duplicate)
        if duplicate.waited >= self.max_wait:
            return Fail()
        delay = min(max(duplicate.waited / 4, _SHORTEST), _LONGEST)
        return Follow(min(delay, self.max_wait - duplicate.waited))
