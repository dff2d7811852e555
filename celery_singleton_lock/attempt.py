"""A name for each delivery of a message, known to the worker's main process and to the process that runs the body.

A forked child is sent a number, of which both processes make the token: what they share from before the fork is the secret.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

#: Where a request carries its attempt: among the message's properties, which no retry publishes again.
PROPERTY = "singleton"

#: Header of a message that was published again by us: how often, how many seconds of delay so far, and how many looks.
POSTPONED = "singleton_postponed"


#: What a forked child is sent: content type, events and number. A class takes long to be found by name, at both ends of a pipe.
Numbered: TypeAlias = tuple[str | None, bool, int]

_secret = ""
_owner = 0  # the process that made it


@dataclass
class Attempt:
    """One delivery.

    Arguments:
        token: its secret, 32 hex digits: random, or what a process shares with its forked children and a number (`token_of`).
        content_type: of the message's body; None where that is not known.
        events: whether the worker sends task events.
        watched: whether the main process renews and frees what this attempt holds.
    """

    token: str = field(default_factory=lambda: os.urandom(16).hex(), repr=False)
    content_type: str | None = None
    events: bool = False
    watched: bool = False
    #: Whether the process that runs the body has it.
    arrived: bool = field(default=False, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[..., Attempt], tuple[Any, ...]]:
        """Pickle the token on the way to the child that runs the body; any other copy is an attempt of its own."""
        if self.watched and not self.arrived:
            return Attempt, (self.token, self.content_type, self.events, self.watched)
        return partial(Attempt, content_type=self.content_type, events=self.events), ()


def share_secret() -> None:
    """To be called by a main process before it forks its children. One that was forked from another has its own."""
    global _secret, _owner
    if _owner != os.getpid():
        _secret, _owner = os.urandom(11).hex(), os.getpid()


def is_sharing() -> bool:
    """Whether this process has called `share_secret`."""
    return _owner == os.getpid()


def token_of(number: int) -> str:
    """Of an attempt to which a process that shares its secret has given this number, here or in a child that it has forked."""
    return f"{_secret}{number:010x}"


def attempt_of(request: Any) -> Attempt:
    """The attempt that a request's worker has named, or a new one."""
    found = (request.properties or {}).get(PROPERTY)
    if isinstance(found, tuple):
        content_type, events, number = found
        return Attempt(token_of(number), content_type, events, watched=True)
    if not isinstance(found, Attempt):
        return Attempt()
    found.arrived = True
    return found
