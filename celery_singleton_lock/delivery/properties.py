"""What identifies one delivery of a message, its token, and what identifies the message.

Two deliveries of one task id can run at once, and what a message carries can be copied. So the main process makes the token,
and puts it into the request as a plain tuple, which goes to a prefork child with it.

Users may give one task id to messages with other arguments. Where messages wait in line, each of them has an identity: a digest
of its task id and its body. The main process makes it before user code sees the message. What we publish for it carries it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

#: Where a request carries its delivery: among the message's properties, which no retry publishes again.
PROPERTY = "singleton"


class _Secret(str):
    """A text that is not shown: Celery logs the requests that it sends to its children, at level DEBUG."""

    def __repr__(self) -> str:
        return "'...'"


def new_token() -> str:
    """Return the secret of a new delivery: 32 random hex digits."""
    return _Secret(os.urandom(16).hex())


def identity_of(task_id: object, body: object) -> str:
    """Return the identity of a message: 16 hex digits of BLAKE2b (RFC 7693); "" if its body is neither text nor bytes.

    Arguments:
        body: as the broker sent it.
    """
    data = body.encode(errors="surrogatepass") if isinstance(body, str) else body
    if not isinstance(data, (bytes, bytearray, memoryview)):
        return ""
    name = str(task_id).encode(errors="surrogatepass")
    return blake2b(b"%d:%b%b" % (len(name), name, bytes(data)), digest_size=8).hexdigest()


class Delivery(NamedTuple):
    """One delivery."""

    token: str = ""
    content_type: str | None = None  # of the message's body, where it is known
    events: bool = False  # whether the worker sends task events
    supervised: bool = False  # whether a supervisor renews and releases its lease as well
    identity: str = ""  # of its message; empty if that is not known, or carries it in its `RetryState`


def mapping_of(properties: Any) -> Mapping[str, Any]:
    """Return the properties of a message; none if they are something else, as in users' tests of requests."""
    return properties if isinstance(properties, dict) else {}


def take_delivery(request: Any) -> Delivery:
    """Return a request's delivery, with a new token if it has none; leave none in the request, which users may copy."""
    delivery = delivery_of(request)
    request.properties = {**mapping_of(request.properties), PROPERTY: delivery._replace(token="")}
    return delivery if delivery.token else delivery._replace(token=new_token())


def delivery_of(request: Any) -> Delivery:
    """Return what the worker has noted of a request's delivery."""
    properties = getattr(request, "properties", None)  # no request after `task_postrun`
    found = properties.get(PROPERTY) if isinstance(properties, dict) else None
    return Delivery(*found) if isinstance(found, tuple) else Delivery()  # a message cannot bring a tuple
