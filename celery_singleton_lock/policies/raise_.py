"""The policy that lets a duplicate fail."""

from dataclasses import dataclass
from typing import ClassVar

from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, Policy


@dataclass(frozen=True)
class Raise(Policy):
    """Fail with `DuplicateTask`."""

    ends_duplicates: ClassVar[bool] = True

    def decide(self, duplicate: Duplicate) -> Decision:
        return Fail()
