"""Messages that wait in line for a lock.

The line in the store has what starts a message at once: the holder's end publishes it. The broker keeps the promise that the
message runs, whatever becomes of the line: it has a delayed copy, which comes after each `lock_ttl`, or each minute if that is
shorter, and later if many messages wait before it. A copy never runs the body. If it is its message's turn, it publishes the
message; otherwise it is followed by the next copy. It is dropped once the message has started. Message, copies and place in line
have the same ticket.
"""

from __future__ import annotations

import math
import os
import random
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from celery.exceptions import Reject
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.serialization import dumps

from celery_singleton_lock.config.task_config import TaskConfig
from celery_singleton_lock.context import context_of
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import about
from celery_singleton_lock.policies.decisions import Enqueue, Policy
from celery_singleton_lock.store.protocol import (
    LINE_TOKEN,
    AcquireResult,
    AcquireStatus,
    LeaseRequest,
    LockStore,
    Place,
)
from celery_singleton_lock.worker.decision import decide, policy_of
from celery_singleton_lock.worker.destination import goes_to_several_queues, shortened
from celery_singleton_lock.worker.dispatch import FIRST_RETRY, NEXT_NUMBER, LineMessage, publish_next
from celery_singleton_lock.worker.noting import note_failure
from celery_singleton_lock.worker.replaced import terminate
from celery_singleton_lock.worker.republish import (
    RetryState,
    ignores_result,
    is_redelivered,
    note_state,
    retry_state_of,
    signature_of,
)

_dumps: Any = dumps  # untyped in Kombu

#: Longest time, in seconds, after which the next copy of a waiting message comes.
LONGEST_COPY_DELAY = 60.0
#: By how much later, in seconds, for each message that waits before it. So the copies of a long line do not fill the queue.
_FOR_EACH_BEFORE = 0.05
#: Shortest such time.
_SHORTEST = 0.01


def place_of(task: Any, request: Any, policy: Any) -> Place | None:
    """Return the place in line of a delivery; None where the line does not count."""
    state = retry_state_of(request)
    uses_line = isinstance(policy, Policy) and policy.uses_line
    if not state.ticket and not uses_line:
        return None
    may_stop = policy.stops_holder if isinstance(policy, Policy) else True
    # An own retry replaces nobody, but its redelivery may be that of a body that was replaced.
    place = Place(state.ticket, state.copy, stop=may_stop and (not request.retries or is_redelivered(request)))
    quiet = getattr(policy, "quiet", 0.0)
    if not quiet or request.retries or request.is_eager or goes_to_several_queues(task.app, request):
        return place
    return place._replace(quiet=quiet, max_quiet=policy.max_quiet)


def publish_copy(task: Any, request: Any, wanted: LeaseRequest, decision: Enqueue, result: AcquireResult) -> Place:
    """Publish the message again with a delay, as it begins to wait; return the place that it joins the line with."""
    place, delay = _place_to_join(task, request, wanted, decision, result)
    state = retry_state_of(request)
    copied = state._replace(
        ticket=place.ticket,
        copy=place.next_copy,
        waited=state.waited + delay,
        stands_for=request.id,
        ignore_result=ignores_result(task, request),
        expires=request.expires,
    )
    try:
        _send_copy(task, request, delay, copied)
    except Exception as failure:
        if task.acks_late and isinstance(failure, (OperationalError, OSError)):  # as in `run_later`
            raise Reject(failure, requeue=True) from failure
        raise
    if decision.terminate and result.holder:
        terminate(task, request, wanted, result.holder)
    return place


def _place_to_join(
    task: Any, request: Any, wanted: LeaseRequest, decision: Enqueue, result: AcquireResult
) -> tuple[Place, float]:
    """Return the place that a message joins the line with, and the seconds after which its next copy is due."""
    state = retry_state_of(request)
    asked = wanted.place or Place()  # has a ticket, too, if the message found no room under another policy
    state = state._replace(ticket=state.ticket or asked.ticket or os.urandom(8).hex())
    delay = _delay(task, request, wanted, decision, result)
    following = state.copy + 1 + random.random()
    message = _text(task, request, wanted, _started_by(task, request, state))
    place = Place(state.ticket, state.copy, decision.room, decision.replace, following, delay + wanted.ttl, message)
    place = place._replace(quiet=asked.quiet, max_quiet=asked.max_quiet, stop=decision.stop)
    return place._replace(gives_way=decision.gives_way), delay


def _delay(task: Any, request: Any, wanted: LeaseRequest, decision: Enqueue, result: AcquireResult) -> float:
    """Return the seconds after which the next copy of a message that waits is due.

    That is the rest of a quiet time, a cooldown or a pause, if there is one: nobody's end starts the message then. It ends when
    the message expires.
    """
    rest = result.holder.remaining if result.holder and result.holder.state in ("cooldown", "paused") else 0.0
    interval = min(wanted.ttl, LONGEST_COPY_DELAY) + result.ahead * _FOR_EACH_BEFORE
    delay = min(interval, result.quiet or rest or interval, decision.within, _seconds_left(request.expires))
    return shortened(task.app, max(_SHORTEST, delay))


def _send_copy(task: Any, request: Any, delay: float, state: RetryState) -> None:
    """Publish a copy, which has a task id of its own, stores no result and does not expire."""
    copy = signature_of(task, request, delay, state)
    copy.set(task_id=uuid(), ignore_result=True, expires=None).apply_async()


def publish_again(task: Any, request: Any, delay: float) -> None:
    """Publish a copy again, which this worker may not keep any longer. Its number is higher, so the former one counts no more."""
    state = retry_state_of(request)
    _send_copy(task, request, delay, state._replace(copy=state.copy + 1 + random.random()))


def _started_by(task: Any, request: Any, state: RetryState) -> Any:
    """Return the signature that publishes the message itself, with a number of its own: that of no delayed copy.

    It differs each time, between those of this copy and the next. A copy that is delivered again, as its worker has died,
    publishes the message once more: one of the two runs.
    """
    number = state.copy + 0.5 + 0.4 * random.random()
    own = state._replace(copy=number, stands_for="", ignore_result=False, expires=None)
    return signature_of(task, request, None, own)


def handle_copy(
    task: Any, request: Any, config: TaskConfig, store: LockStore, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> float | None:
    """Let the message of a delayed copy go on waiting, or publish it.

    Return after how many seconds the copy is due again; None if its message has been published, or needs no copy any more.

    Raises:
        StoreUnavailable: the store cannot be asked now.
    """
    state = retry_state_of(request)
    wanted = LeaseRequest(config.base, "", LINE_TOKEN, config.options.lock_ttl, request.id, queued=True)
    try:  # the user's functions may raise, and the parameters may have changed
        wanted = replace(wanted, digest=config.digest(args, kwargs), limit=config.limit(args, kwargs))
        wanted.place = place_of(task, request, config.options.on_duplicate)
        if wanted.place:  # until when the next one is due at the latest, if the message goes on waiting
            wanted.place = wanted.place._replace(due=_longest_delay(task, wanted.ttl, state) + wanted.ttl)
        result = _acquire(task, store, wanted)
        if result.status is AcquireStatus.DROPPED or _runs(request, result):
            return None
        counts = result.status in (AcquireStatus.HELD, AcquireStatus.GRANTED)
        if counts and _seconds_left(state.expires) <= 0:
            return _revoke_expired(task, request, wanted, store, state)
        if result.status is AcquireStatus.HELD:
            delay = _go_on_waiting(task, request, config, store, wanted, result)
            if delay is not None:
                return delay
    except StoreError as error:
        log = about(task, request.id, wanted.lock)
        context_of(task.app).outages.log(log, "could not ask for its place in line: %s", error)
        note_failure(task, wanted, "acquire", error)
        if isinstance(error, StoreUnavailable):  # else the message will fail with it
            raise
    except Exception as failure:
        _fail(task, request, wanted, store, failure)
        return None
    return _publish_message(task, request, wanted, store, state)


def _go_on_waiting(
    task: Any, request: Any, config: TaskConfig, store: LockStore, wanted: LeaseRequest, result: AcquireResult
) -> float | None:
    """Return when the copy of a message that found the lock held is due again; None if the message is to be published.

    A message that has lost its place joins the line again.
    """
    _, decision = decide(task, request, policy_of(task, config.options, result.holder or Holder()), result)
    if not isinstance(decision, Enqueue):
        return None
    state = retry_state_of(request)
    if result.is_waiting:
        delay = _delay(task, request, wanted, decision, result)
    else:
        wanted.place, delay = _place_to_join(task, request, wanted, decision, result)
        state = state._replace(copy=wanted.place.next_copy)
        result = _acquire(task, store, wanted)
        if not result.is_waiting:
            return None
    if decision.terminate and result.holder:
        terminate(task, request, wanted, result.holder)
    note_state(request, state._replace(waited=state.waited + delay))
    return delay


def _longest_delay(task: Any, ttl: float, state: RetryState) -> float:
    """Return a bound of the seconds until a copy is due again: before it, fewer messages wait than before."""
    return shortened(task.app, min(ttl, LONGEST_COPY_DELAY) + state.waited)


def _acquire(task: Any, store: LockStore, wanted: LeaseRequest) -> AcquireResult:
    """Return the store's answer; publish the message that it names, if it names one."""
    result = store.acquire(wanted)
    publish_next(task.app, result.message)
    return result


def _runs(request: Any, result: AcquireResult) -> bool:
    """Tell whether the message itself holds the lock, as after a loss of data that its copy did not know of."""
    holder = result.holder
    return holder is not None and holder.task_id == request.id and holder.state == "running"


def _seconds_left(expires: Any) -> float:
    """Return the seconds until a message expires: infinity if it never does."""
    time_of = maybe_iso8601(expires) if expires else None
    return maybe_make_aware(time_of).timestamp() - time.time() if time_of else math.inf


def _publish_message(
    task: Any, request: Any, wanted: LeaseRequest, store: LockStore, state: RetryState
) -> float | None:
    """Publish the message that a delayed copy stands for. If that fails, give its turn back, and return when to try again."""
    signature = _started_by(task, request, state)
    try:
        signature.apply_async()
    except Exception as failure:
        about(task, request.id, wanted.lock).warning("could not be published in its turn: %r", failure)
        if state.ticket and wanted.digest:
            # It may have been published all the same, so the next one has a number of its own.
            note_state(request, state._replace(copy=state.copy + NEXT_NUMBER))
            text = _text(task, request, wanted, _started_by(task, request, retry_state_of(request)))
            with suppress(StoreError):  # it has its turn for a TTL
                store.give_back(wanted, state.ticket, text)
        return FIRST_RETRY
    return None


def _revoke_expired(task: Any, request: Any, wanted: LeaseRequest, store: LockStore, state: RetryState) -> float | None:
    """Publish an expired message without its ticket: the worker that receives it stores REVOKED. It leaves the line."""
    delay = _publish_message(task, request, wanted, store, state._replace(ticket=""))
    if delay is None:
        leave(task, store, wanted, state.ticket)
    return delay


def _fail(task: Any, request: Any, wanted: LeaseRequest, store: LockStore, failure: Exception) -> None:
    """Store FAILURE for a message that nobody would publish any more."""
    about(task, request.id, wanted.lock).error("waited in line and could neither go on nor be published: %s", failure)
    task.backend.mark_as_failure(request.id, failure, request=request)
    try:
        if wanted.digest:
            leave(task, store, wanted, retry_state_of(request).ticket)
    except StoreError as error:
        context_of(task.app).outages.log(about(task, request.id, wanted.lock), "could not leave the line: %s", error)


def leave_line(
    task: Any, config: TaskConfig, state: RetryState, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Take a message that no worker will start out of the line, and publish the next one if it was its turn."""
    digest, limit = config.digest(args, kwargs), config.limit(args, kwargs)
    wanted = LeaseRequest(config.base, digest, LINE_TOKEN, config.options.lock_ttl, queued=True, limit=limit)
    leave(task, context_of(task.app).store, wanted, state.ticket)


def leave(task: Any, store: LockStore, wanted: LeaseRequest, ticket: str) -> None:
    """Take a message out of the line, and publish the next one if it was its turn.

    Raises:
        StoreError: the store is unreachable, or refused.
    """
    publish_next(task.app, store.leave(wanted, ticket))


class _Recorder:
    """A producer that publishes nothing, and notes what it was to publish."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.noted: list[tuple[Any, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> None:
        self.noted.append((body, options))


def _text(task: Any, request: Any, wanted: LeaseRequest, signature: Any) -> str:
    """Return the message of a signature as JSON: its body, its queue, and the options of `kombu.Producer.publish`.

    The body of another serializer travels as its bytes. Return nothing if the text is long: then its copy starts it.
    """
    log = about(task, request.id, wanted.lock)
    try:
        with task.app.producer_or_acquire() as producer:
            recorder = _Recorder(producer)
            signature.apply_async(producer=recorder)
        body, options = recorder.noted[0]  # Celery may also send an event with it
        declared, exchange = options.pop("declare") or [None], options["exchange"]
        options["exchange"] = getattr(exchange, "name", exchange)
        options.pop("expiration", None)  # counts from the publish; workers look at the header `expires`
        if options["serializer"] != "json":
            body = _as_bytes(body, options)
        queue = getattr(declared[0], "name", None)
        text = LineMessage(body, queue, options, wanted.base, wanted.digest, wanted.limit, wanted.ttl).text
    except Exception as failure:  # such as a header that JSON cannot express, or an error of a receiver of signals
        log.warning("waits in line, and only a delayed copy can start it: %r", failure)
        return ""
    longest = context_of(task.app).settings.max_message
    if len(text) <= longest:
        return text
    if not retry_state_of(request).ticket:  # it comes for the first time
        log.warning(
            "waits in line, and only a delayed copy can start it: its message has %d bytes, more than "
            "singleton_lock_max_message=%d", len(text), longest,
        )  # fmt: skip
    return ""


def _as_bytes(body: Any, options: dict[str, Any]) -> str:
    """Return the body of a message as Base64 text, and have the options say what its bytes are."""
    content_type, encoding, data = _dumps(body, options.pop("serializer"))
    options.update(content_type=content_type, content_encoding=encoding)
    return b64encode(data.encode(encoding) if isinstance(data, str) else data).decode()
