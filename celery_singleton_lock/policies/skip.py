"""The policy that does not run a duplicate."""

from dataclasses import dataclass
from typing import Any, ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Policy, SkipRun
from celery_singleton_lock.policies.retry_later import RetryLater


@dataclass(frozen=True)
class Skip(Policy):
    """Do not run; the task succeeds. A task's own retry is postponed as by `RetryLater()` instead.

    Arguments:
        result: the result of the task.
        own_retries: whether a task's own retry is skipped too.

    Raises:
        ConfigurationError: `own_retries` is neither True nor False.
    """

    result: Any = None
    own_retries: bool = False
    ends_duplicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.own_retries, bool):
            raise ConfigurationError(f"{type(self).__name__}: own_retries={self.own_retries!r} must be True or False")

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.own_retry and not self.own_retries:
            return RetryLater().decide(duplicate)
        return SkipRun(self.result)
