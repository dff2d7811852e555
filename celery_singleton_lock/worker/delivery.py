"""What identifies one delivery of a message: its token.

Two deliveries of one task id can run at once, and what a message carries can be copied. So the main process makes the token,
and puts it into the request as a plain tuple, which goes to a prefork child with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

#: Where a request carries its delivery: among the message's properties, which no retry publishes again.
PROPERTY = "singleton"


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
        watched: whether a supervisor renews and releases its lease as well.
    """

    token: str = field(default_factory=new_token, repr=False)
    content_type: str | None = None
    events: bool = False
    watched: bool = False

    def __reduce__(self) -> tuple[Callable[..., Delivery], tuple[()]]:
        """Make every copy and pickle a delivery of its own, without the token."""
        return partial(Delivery, content_type=self.content_type, events=self.events), ()


def delivery_of(request: Any) -> Delivery:
    """Return the delivery that a request's worker has named, or a new one."""
    found = (request.properties or {}).get(PROPERTY)
    if isinstance(found, tuple):  # as it was sent
        found = request.properties[PROPERTY] = Delivery(*found)
    return found if isinstance(found, Delivery) else Delivery()
