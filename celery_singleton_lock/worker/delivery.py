"""A name for each delivery of a message, known to the worker's main process and to the process that runs the body.

The main process makes it and puts it into the request as a plain tuple, which is quick to pickle on the way to a prefork child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

#: Where a request carries its attempt: among the message's properties, which no retry publishes again.
PROPERTY = "singleton"

#: Header of a message that was published again by us: how often, how many seconds of delay so far, and how many looks.
POSTPONED = "singleton_postponed"


class _Secret(str):
    """A text that is not shown: Celery logs the requests that it sends to its children, at level DEBUG."""

    def __repr__(self) -> str:
        return "'...'"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def new_token() -> str:
    """Return the secret of a new delivery: 32 random hex digits."""
    return _Secret(os.urandom(16).hex())


@dataclass
class Delivery:
    """One delivery.

    Arguments:
        token: its secret.
        content_type: of the message's body; None where that is not known.
        events: whether the worker sends task events.
        supervised: whether the main process renews and releases what this attempt holds.
    """

    token: str = field(default_factory=new_token, repr=False)
    content_type: str | None = None
    events: bool = False
    supervised: bool = False

    def __reduce__(self) -> tuple[Callable[..., Delivery], tuple[()]]:
        """Make every copy and pickle an attempt of its own, without the token."""
        return partial(Delivery, content_type=self.content_type, events=self.events), ()


def delivery_of(request: Any) -> Delivery:
    """Return the attempt that a request's worker has named, or a new one."""
    found = (request.properties or {}).get(PROPERTY)
    if isinstance(found, tuple):  # as it was sent
        found = request.properties[PROPERTY] = Delivery(*found)
    return found if isinstance(found, Delivery) else Delivery()
