"""A name for each delivery of a message, known to the worker's main process and to the process that runs the body."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

#: Where a request carries its attempt: among the message's properties, which no retry publishes again.
PROPERTY = "singleton"

#: Header of a message that was published again by us: how often, how many seconds of delay so far, and how many looks.
POSTPONED = "singleton_postponed"


@dataclass
class Attempt:
    """One delivery.

    Arguments:
        token: its secret, random, 128 bits.
        serializer: how the message's body was written; empty where that is not known.
        events: whether the worker sends task events.
        watched: whether the main process renews and frees what this attempt holds.
    """

    token: str = field(default_factory=lambda: os.urandom(16).hex(), repr=False)
    serializer: str = ""
    events: bool = False
    watched: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """For the way to a child: without a dict of attributes, which takes longer."""
        return Attempt, (self.token, self.serializer, self.events, self.watched)


def attempt_of(request: Any) -> Attempt:
    """The attempt that a request's worker has named, or a new one."""
    found = (request.properties or {}).get(PROPERTY)
    return found if isinstance(found, Attempt) else Attempt()
