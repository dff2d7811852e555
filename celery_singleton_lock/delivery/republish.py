"""Publishes the message of a delivery again with all that it carried, and with a header that counts how often."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

from celery.app.task import Context
from kombu.serialization import registry

from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.properties import PROPERTY, delivery_of, mapping_of
from celery_singleton_lock.delivery.retry_state import RETRY_STATE_HEADER, RetryState
from celery_singleton_lock.delivery.routing import destination

#: Types that a header can have. A receiver of `task_prerun` may have put anything else on the request.
_SENDABLE = (str, int, float, Decimal, bytes, datetime, list, dict, type(None))
#: Headers by which RabbitMQ finds cycles of dead letters. It would drop the message.
_DEAD_LETTER = ("x-death", "x-first-death-", "x-last-death-")
#: Properties that Celery and Kombu make anew for each message. The others are the publisher's.
_OWN_PROPERTIES = {
    *("correlation_id", "reply_to", "priority", "expiration", "delivery_info", "delivery_tag", "body_encoding"),
    *("content_type", "content_encoding", "application_headers", "headers", PROPERTY),
    "lock_options",  # given to `send_task`, which does not know it
}


def signature_of(attempt: Attempt, delay: float | None, state: RetryState) -> Any:
    """Return the signature that publishes a message again, with what `Task.signature_from_request` (5.7) leaves out.

    Arguments:
        delay: seconds; None for none at all.
    """
    task, request = attempt.task, attempt.request
    options = {
        **{name: value for name, value in mapping_of(request.properties).items() if name not in _OWN_PROPERTIES},
        "countdown": delay,
        "retries": request.retries,
        "headers": {**_headers(request), RETRY_STATE_HEADER: state._replace(identity=attempt.identity)._asdict()},
        "ignore_result": attempt.ignores_result,
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
    return {name: value for name, value in (headers or {}).items() if not name.startswith(_DEAD_LETTER)}
