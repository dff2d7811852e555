"""The policy that lets duplicates wait in line."""

import math
from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Fail, Policy


@dataclass(frozen=True)
class Wait(Policy):
    """Wait in line; the first in line starts as soon as the holder has ended.

    Arguments:
        max_waiting: how many messages may wait for one lock; further ones fail with `DuplicateTask`.
        max_wait: seconds after which a message that waits fails with `DuplicateTask`; ``math.inf`` means never.

    Raises:
        ConfigurationError: a value is out of range.
    """

    max_waiting: int = 1000
    max_wait: float = 3600.0
    uses_line: ClassVar[bool] = True
    keeps_duplicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.max_waiting, bool) or not isinstance(self.max_waiting, int) or self.max_waiting < 1:
            raise ConfigurationError(f"Wait: max_waiting={self.max_waiting!r} must be a number from 1")
        is_number = isinstance(self.max_wait, (int, float)) and not isinstance(self.max_wait, bool)
        if not is_number or not 0 <= self.max_wait <= math.inf:
            raise ConfigurationError(f"Wait: max_wait={self.max_wait!r} must be a number of seconds from 0")

    def decide(self, duplicate: Duplicate) -> Decision:
        is_full = duplicate.waiting >= self.max_waiting and not duplicate.is_waiting
        left = self.max_wait - duplicate.waited
        return Fail() if is_full or left <= 0 else Enqueue(self.max_waiting, within=left)
