"""The policy that does not run a duplicate."""

from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.policies.decisions import Decision, Duplicate, Policy, SkipRun


@dataclass(frozen=True)
class Skip(Policy):
    """Do not run; the task succeeds.

    Arguments:
        result: the result of the task.
    """

    result: Any = None

    def decide(self, duplicate: Duplicate) -> Decision:
        return SkipRun(self.result)
