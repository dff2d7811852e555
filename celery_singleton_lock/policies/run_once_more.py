"""The policy that lets one duplicate wait, and stand for all others."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Policy, SkipRun
from celery_singleton_lock.policies.retry_later import RetryLater

#: Which of the calls that wait runs.
Keep = Literal["first", "latest"]


def check_keep(policy: Any) -> None:
    """Raise `ConfigurationError` unless the policy's `keep` is one of the two words."""
    if policy.keep not in get_args(Keep):
        raise ConfigurationError(f"{type(policy).__name__}: keep={policy.keep!r} must be 'first' or 'latest'")


@dataclass(frozen=True)
class RunOnceMore(Policy):
    """Let one duplicate run after the holder. Others that come meanwhile end at once, as under `Skip`.

    Arguments:
        keep: which of them runs: the `"first"`, or the `"latest"`, with its own id and arguments.

    Raises:
        ConfigurationError: the value is another one.
    """

    keep: Keep = "first"
    uses_line: ClassVar[bool] = True
    needs_same_work: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_keep(self)

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.own_retry:
            return RetryLater().decide(duplicate)
        others = duplicate.waiting and not duplicate.is_waiting
        if others and (self.keep == "first" or duplicate.has_waited):
            return SkipRun(pending=duplicate.head)
        # A message that has lost its place is no newcomer: it takes no other's place when it joins again.
        is_latest = self.keep == "latest"
        return Enqueue(1, replace=is_latest and not duplicate.has_waited, gives_way=is_latest)
