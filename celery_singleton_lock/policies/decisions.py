"""The base class of policies, what a policy is given, and the decisions that it may return."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

from celery_singleton_lock.holder import Holder


@dataclass(frozen=True)
class Duplicate:
    """A delivery that found its signature held."""

    holder: Holder
    times: int = 0  # how often the message was published again so far
    waited: float = 0.0  # seconds of delay in all of these
    can_run_later: bool = True  # false in an eager run and for a broadcast message
    own_retry: bool = (
        False  # the task's own retry: its work has begun, and somebody awaits it; false where it cannot run later
    )


@dataclass(frozen=True)
class SkipRun:
    """Do not run the body; store SUCCESS with this result."""

    result: Any = None


@dataclass(frozen=True)
class RunLater:
    """Publish the message again, with this delay in seconds, above 0.

    An eager run fails instead, and a broadcast message is skipped.
    """

    delay: float


@dataclass(frozen=True)
class Fail:
    """Do not run the body; raise `DuplicateTask`."""


Decision: TypeAlias = SkipRun | RunLater | Fail


class Policy(ABC):
    """Decides what happens to duplicates, without any side effect; `worker.outcome` acts on the decision, and logs it."""

    @abstractmethod
    def decide(self, duplicate: Duplicate) -> Decision:
        """Return what to do with this duplicate."""
