"""The policy that lets one call run once no other came for a time."""

from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies.decisions import Decision, Duplicate, Policy
from celery_singleton_lock.policies.run_once_more import Keep, RunOnceMore, check_keep

_LONGEST = 366 * 86400.0  # seconds


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Debounce(Policy):
    """Let one call run when no other call came for `quiet` seconds and nobody holds the lock. The others end as under `Skip`.

    No call runs at once, also the first one.

    Arguments:
        quiet: seconds without another call before the run.
        max_quiet: seconds after the first call after which the run does not wait for quiet any longer.
        keep: which of them runs: the `"first"`, or the `"latest"`, with its own id and arguments.

    Raises:
        ConfigurationError: a value is out of range.
    """

    quiet: float
    max_quiet: float
    keep: Keep = "first"
    uses_line: ClassVar[bool] = True
    needs_same_work: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_keep(self)
        if not _is_number(self.quiet) or not 0 < self.quiet <= _LONGEST:
            raise ConfigurationError(
                f"Debounce: quiet={self.quiet!r} must be a number of seconds above 0, up to a year"
            )
        if not _is_number(self.max_quiet) or not self.quiet <= self.max_quiet <= _LONGEST:
            raise ConfigurationError(
                f"Debounce: max_quiet={self.max_quiet!r} must be a number of seconds from quiet to a year"
            )

    def decide(self, duplicate: Duplicate) -> Decision:
        return RunOnceMore(self.keep).decide(duplicate)
