"""The base class of policies, what a policy is given, and the decisions that it may return."""

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeAlias

from celery_singleton_lock.holder import Holder


class Duplicate(NamedTuple):
    """A delivery that found its lock held."""

    holder: Holder
    times: int = 0  # how often the message was published again so far
    waited: float = 0.0  # seconds of delay in all of these
    can_run_later: bool = True  # false in an eager run and for a broadcast message
    own_retry: bool = False  # the task's own retry, whose work has begun; false where it cannot run later
    waiting: int = 0  # how many messages wait in line
    head: str = ""  # task id of the first of them
    is_waiting: bool = False  # whether this message is one of them
    has_waited: bool = False  # whether it has ever been
    asked: float = 0.0  # seconds since the holder was asked to stop; 0 if it was not


class SkipRun(NamedTuple):
    """Do not run the body; store SUCCESS with this result.

    Arguments:
        pending: task id of a waiting run that stands for this one.
        level: of the log line that says so.
    """

    result: Any = None
    pending: str = ""
    level: int = logging.INFO


class RunLater(NamedTuple):
    """Publish the message again, with this delay in seconds, above 0.

    An eager run fails instead, and a broadcast message is skipped.
    """

    delay: float


class Enqueue(NamedTuple):
    """Wait in line for the lock.

    An eager run fails instead, and a broadcast message is skipped. If there is no room, the policy is asked again.

    Arguments:
        room: how many messages may wait, this one included.
        replace: whether this message takes the place of one that waits and gives way, which then ends as skipped.
        gives_way: whether a later message with `replace` may take its place; one with `replace` gives way, too.
        stop: whether a holder is asked to stop; a message that has the lock and has not started ends as skipped.
        within: seconds after which the policy is asked again at the latest; it may be asked earlier.
        terminate: whether a holder that was asked to stop is terminated, where its pool can do that.
    """

    room: int
    replace: bool = False
    stop: bool = False
    within: float = math.inf
    terminate: bool = False
    gives_way: bool = False


class Follow(NamedTuple):
    """End as the holder's task ends; look at that again after this delay in seconds, above 0.

    An eager run fails instead, and so does a task that descends from the holder. A broadcast message is skipped.
    """

    delay: float


@dataclass(frozen=True)
class Fail:
    """Do not run the body; raise `DuplicateTask`."""


Decision: TypeAlias = SkipRun | RunLater | Enqueue | Follow | Fail


class Policy(ABC):
    """Decides what happens to duplicates, without any side effect; `delivery.ending` acts on the decision, and logs it."""

    #: Whether duplicates wait in line. Then newcomers ask the line, too, so that they do not overtake.
    uses_line: ClassVar[bool] = False
    #: Whether duplicates ask the holder to stop. Then holders look each second whether they are asked.
    stops_holder: ClassVar[bool] = False
    #: Whether duplicates end with the holder's result. Then the task needs a result backend that workers can read.
    reads_result: ClassVar[bool] = False
    #: Whether no duplicate runs, own retries apart. Then the store counts one when it refuses its publication.
    ends_duplicates: ClassVar[bool] = False
    #: Whether each duplicate runs in time, or fails. Then it also suits a message whose work has begun, and was cut off.
    keeps_duplicates: ClassVar[bool] = False
    #: Whether another run stands for a duplicate. Then it cannot be used in a `lock_group`, where that may be other work.
    needs_same_work: ClassVar[bool] = False

    @abstractmethod
    def decide(self, duplicate: Duplicate) -> Decision:
        """Return what to do with this duplicate."""

    def __json__(self) -> dict[str, Any]:
        """Return the form in which a message carries this policy: its class and the fields that differ from their defaults.

        Kombu's JSON serializer calls it, for example for the steps of a chain.
        """
        own = {row.name: getattr(self, row.name) for row in fields(self)}  # type: ignore[arg-type]
        defaults = {row.name: row.default for row in fields(self)}  # type: ignore[arg-type]
        return {"policy": type(self).__name__, **{name: v for name, v in own.items() if v != defaults[name]}}
