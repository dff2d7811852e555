"""The policy that lets a duplicate fail."""

from dataclasses import dataclass

from celery_singleton_lock.policies.decisions import Decision, Duplicate, Fail, Policy


@dataclass(frozen=True)
class Raise(Policy):
    """Fail with `DuplicateTask`."""

    def decide(self, duplicate: Duplicate) -> Decision:
        return Fail()
