"""The policy that lets one duplicate wait, and stand for all others."""

from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Enqueue, Policy, SkipRun
from celery_singleton_lock.policies.retry_later import RetryLater

_LONGEST = 366 * 86400.0  # seconds


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class RunOnceMore(Policy):
    """Let one duplicate run after the holder. Others that come meanwhile end at once, as under `Skip`.

    With `quiet`, it is a debounce: no call runs at once, also the first one. The run starts when no other call came for `quiet`
    seconds and nobody holds the lock.

    Arguments:
        keep: which of them runs: the `"first"`, or the `"latest"`, with its own id and arguments.
        quiet: seconds without another call before the run; 0: none.
        max_quiet: seconds after the first call after which the run does not wait for quiet any longer; required with `quiet`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    keep: str = "first"
    quiet: float = 0.0
    max_quiet: float | None = None
    uses_line: ClassVar[bool] = True
    needs_same_work: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.keep not in ("first", "latest"):
            raise ConfigurationError(f"RunOnceMore: keep={self.keep!r} must be 'first' or 'latest'")
        if not _is_number(self.quiet) or not 0 <= self.quiet <= _LONGEST:
            raise ConfigurationError(f"RunOnceMore: quiet={self.quiet!r} must be a number of seconds from 0 to a year")
        if self.quiet and not _is_number(self.max_quiet):
            raise ConfigurationError(f"RunOnceMore: quiet={self.quiet!r} needs a max_quiet, in seconds")
        if self.max_quiet is not None and not self.quiet:
            raise ConfigurationError(f"RunOnceMore: max_quiet={self.max_quiet!r} needs quiet, in seconds")
        if self.max_quiet is not None and not (_is_number(self.max_quiet) and self.quiet <= self.max_quiet <= _LONGEST):
            raise ConfigurationError(
                f"RunOnceMore: max_quiet={self.max_quiet!r} must be a number of seconds from quiet to a year"
            )

    def decide(self, duplicate: Duplicate) -> Decision:
        if duplicate.own_retry:
            return RetryLater().decide(duplicate)
        others = duplicate.waiting and not duplicate.is_waiting
        if others and (self.keep == "first" or duplicate.has_waited):
            return SkipRun(pending=duplicate.head)
        # A message that has lost its place is no newcomer: it takes no other's place when it joins again.
        return Enqueue(1, replace=self.keep == "latest" and not duplicate.has_waited)
