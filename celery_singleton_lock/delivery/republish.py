"""Publishes the message of a delivery again with all that it carried, and with a header that counts how often."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from celery.app.task import Context
from kombu.serialization import registry

from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER
from celery_singleton_lock.delivery.properties import PROPERTY, delivery_of, mapping_of
from celery_singleton_lock.delivery.routing import destination

#: Header of a message that was published again: the fields of its `RetryState`.
RETRY_STATE_HEADER = "singleton_retry_state"
#: Types that a header can have. A receiver of `task_prerun` may have put anything else on the request.
_SENDABLE = (str, int, float, Decimal, bytes, datetime, list, dict, type(None))
#: Headers by which RabbitMQ finds cycles of dead letters. It would drop the message.
_DEAD_LETTER = re.compile(r"x-(death$|first-death-|last-death-)")
#: Properties that Celery and Kombu make anew for each message. The others are the publisher's.
_OWN_PROPERTIES = {
    *("correlation_id", "reply_to", "priority", "expiration", "delivery_info", "delivery_tag", "body_encoding"),
    *("content_type", "content_encoding", "application_headers", "headers", PROPERTY),
    "lock_options",  # given to `send_task`, which does not know it
}


class RetryState(NamedTuple):
    """How often a message was published again so far."""

    times: int = 0  # as a duplicate, or because the store was unreachable
    waited: float = 0.0  # seconds of delay in all of these
    redelivery_checks: int = 0  # since then, to find out how another delivery of the same message ended
    ticket: str = ""  # of its place in the line, if it has waited there
    copy: float = 0.0  # number of this copy, which grows from copy to copy
    original_id: str = ""  # in a delayed copy: the task id of its message
    ignore_result: bool = False  # in a delayed copy: whether its message ignores its result
    follows: str = ""  # the task id whose result this message ends with
    was_free_before: bool = False  # whether the lock was free when that task was last looked at
    is_unfinished: bool = False  # whether an earlier delivery of it began its body, and did not end it
    expires: str | None = None  # in a delayed copy: when its message expires, as an ISO text
    due: float = 0.0  # in a delayed copy: when the store is asked, in Unix time; a broker may not bear so long a delay


def retry_state_of(request: Any) -> RetryState:
    """Return how often the message of a request was published again."""
    # Not from `request.headers`: Datadog and older Sentry nest a dict in the headers, and Celery then shows only that one.
    found = request.get(RETRY_STATE_HEADER) or {}
    return RetryState(**{name: found[name] for name in RetryState._fields if name in found})


def note_unfinished(request: Any) -> None:
    """Have the message of a request say from now on that its body began in an earlier delivery, and did not end."""
    note_state(request, retry_state_of(request)._replace(is_unfinished=True))


def note_state(request: Any, state: RetryState) -> None:
    """Have a request carry this state."""
    setattr(request, RETRY_STATE_HEADER, state._asdict())


def forget_retry_state(request: Any) -> None:
    """Remove the retry state from the request's headers, so that the task's own retries start without it."""
    if request.headers and RETRY_STATE_HEADER in request.headers:
        request.headers = {name: value for name, value in request.headers.items() if name != RETRY_STATE_HEADER}


def lock_options_of(request: Any) -> Any:
    """Return the options that the call was given, None if it was given none; have the task's own retries carry them."""
    found = getattr(request, LOCK_OPTIONS_HEADER, None)
    if found is None:
        return (request.headers or {}).get(LOCK_OPTIONS_HEADER) if request.is_eager else None
    if LOCK_OPTIONS_HEADER not in (request.headers or {}):  # nested headers, as in `retry_state_of`
        request.headers = {**(request.headers or {}), LOCK_OPTIONS_HEADER: found}
    return found


def is_redelivered(request: Any) -> bool:
    """Tell whether an earlier delivery of the same message may be running, or has run."""
    state = retry_state_of(request)
    return bool((request.delivery_info or {}).get("redelivered")) or state.redelivery_checks > 0 or state.is_unfinished


def signature_of(task: Any, request: Any, delay: float | None, state: RetryState) -> Any:
    """Return the signature that publishes a message again, with what `Task.signature_from_request` (5.7) leaves out.

    Arguments:
        delay: seconds; None for none at all.
    """
    options = {
        **{name: value for name, value in mapping_of(request.properties).items() if name not in _OWN_PROPERTIES},
        "countdown": delay,
        "retries": request.retries,
        "headers": {**_headers(request), RETRY_STATE_HEADER: state._asdict()},
        "ignore_result": ignores_result(task, request),
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
        # Kombu's name of the serializer that wrote the message's body.
        "serializer": registry.type_to_name.get(delivery_of(request).content_type) or task.serializer,
        "add_to_parent": False,
        **destination(task.app, request),
    }
    if request.get("compression"):
        options["compression"] = request.get("compression")
    signature = task.signature_from_request(request, **options)
    signature.options.pop("redelivered", None)  # came with `delivery_info`
    return signature


def ignores_result(task: Any, request: Any) -> bool:
    """Do as `celery.app.task.get_actual_ignore_result` (5.7): the default of the request's class does not count."""
    asked = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if asked is None else asked)


def _headers(request: Any) -> dict[str, Any]:
    """Return the headers that are not Celery's, nested ones where they were nested.

    ``parent_id`` is Celery's, but `send_task` would make a task without a parent its own parent.
    """
    plain = {name: value for name, value in vars(request).items() if name != "headers" and isinstance(value, _SENDABLE)}
    own, seen = _without_dead_letters(Context(plain).headers), _without_dead_letters(request.headers)
    if own != seen:
        own["headers"] = seen
    return {**own, "parent_id": request.parent_id}


def _without_dead_letters(headers: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (headers or {}).items() if not _DEAD_LETTER.match(name)}
