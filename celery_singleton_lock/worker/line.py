"""Deliveries that wait in line for a lock, and the message of the first in line, which the holder's end publishes.

The broker keeps the promise that a waiting message runs, the store makes it quick: a copy of the message comes back from the
broker after each `lock_ttl`, and the line in the store has what starts the message at once. Both carry the same ticket. When one
of them starts, the others are dropped.
"""

from __future__ import annotations

import os
import random
from typing import Any

from celery.canvas import Signature
from kombu.utils import json

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies.decisions import Enqueue, Policy
from celery_singleton_lock.store.protocol import LeaseRequest, LockStore, Place
from celery_singleton_lock.worker.destination import shortened
from celery_singleton_lock.worker.republish import retry_state_of, signature_of

_json: Any = json  # untyped in Kombu

#: Longest text of a message in the line. A longer one is started by its delayed copy.
MAX_MESSAGE = 64 * 1024


def place_of(request: Any, policy: Any) -> Place | None:
    """Return the place in line of a delivery; None where the line does not count."""
    state = retry_state_of(request)
    if state.ticket:
        return Place(state.ticket, state.copy)
    return Place() if isinstance(policy, Policy) and policy.uses_line else None


def publish_copy(task: Any, request: Any, wanted: LeaseRequest, decision: Enqueue) -> Place:
    """Publish the message again with a delay; return the place that it joins the line with."""
    state = retry_state_of(request)
    delay = shortened(task.app, wanted.ttl)
    ticket, following = state.ticket or os.urandom(8).hex(), state.copy + 1 + random.random()
    copied = state._replace(ticket=ticket, copy=following, waited=state.waited + delay)
    signature_of(task, request, delay, copied).apply_async()
    # Another number than that of any copy, and an earlier one than that of the copy which comes in any case.
    message = _text(signature_of(task, request, None, state._replace(ticket=ticket, copy=state.copy + 0.5)))
    return Place(ticket, state.copy, decision.room, decision.replace, following, delay + wanted.ttl, message)


def wake(task: Any, store: LockStore, wanted: LeaseRequest) -> None:
    """Publish the message of the first in line, for which the lock is reserved. If that fails, its copy starts it later."""
    try:
        text = store.wake(wanted)
        if text:
            Signature.from_dict(_json.loads(text), app=task.app).apply_async()
    except StoreError as error:
        logger.warning("Task %s: the next in line for %s starts later: %s", task.name, wanted.lock, error)
    except Exception as error:  # the broker, or a receiver of a signal
        logger.warning("Task %s: the next in line for %s could not be published: %r", task.name, wanted.lock, error)


def _text(signature: Any) -> str:
    """Return a signature as JSON, or nothing if it is long, or if JSON may change its arguments."""
    options = dict(signature.options)
    if options["serializer"] != "json":
        return ""
    queue = options.get("queue")
    options["queue"] = getattr(queue, "name", queue)
    text: str = _json.dumps({**signature, "options": options})
    return text if len(text) <= MAX_MESSAGE else ""
