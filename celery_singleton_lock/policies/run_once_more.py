"""The policy that lets one duplicate wait, and stand for all others."""

from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Policy, SkipRun
from celery_singleton_lock.policies.retry_later import RetryLater


@dataclass(frozen=True)
class RunOnceMore(Policy):
    """Let one duplicate run after the holder. Others that come meanwhile end at once, as under `Skip`.

    Arguments:
        keep: which of them runs: the `"first"`, or the `"latest"`, with its own id and arguments.

    Raises:
        ConfigurationError: `keep` is something else.
    """

    keep: str = "first"
    uses_line: ClassVar[bool] = True
    needs_same_work: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.keep not in ("first", "latest"):
            raise ConfigurationError(f"RunOnceMore: keep={self.keep!r} must be 'first' or 'latest'")

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.own_retry:
            return RetryLater().decide(duplicate)
        others = duplicate.waiting and not duplicate.is_waiting
        if others and (self.keep == "first" or duplicate.has_waited):
            return SkipRun(pending=duplicate.head)
        return Enqueue(1, replace=self.keep == "latest")
