"""How a message joins the line for a lock, and leaves it.

The line in the store has what starts a message at once: the holder's end publishes it. The broker keeps the promise that the
message runs, whatever becomes of the line: it has a delayed copy, which comes after each `lock_ttl`, or each minute if that is
shorter, and later if many messages wait before it. A copy never runs the body. If it is its message's turn, it publishes the
message; otherwise it is followed by the next copy. It is dropped once the message has started. Message, copies and place in line
have the same ticket, which begins with the identity of the message: users may give one task id to messages with other arguments.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import remote
from celery_singleton_lock.config.task_config import TaskConfig
from celery_singleton_lock.context import context_of
from celery_singleton_lock.delivery import ending
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.delays import LONGEST_DELAY, shortened
from celery_singleton_lock.delivery.republish import signature_of
from celery_singleton_lock.delivery.retry_state import RetryState
from celery_singleton_lock.delivery.routing import goes_to_several_queues
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.line.dispatch import publish_next
from celery_singleton_lock.line.message import text_of
from celery_singleton_lock.policies.decisions import Enqueue, Policy
from celery_singleton_lock.store.keys import LINE_TOKEN
from celery_singleton_lock.store.protocol import AcquireResult
from celery_singleton_lock.store.requests import LeaseSpec, Place

#: Longest time, in seconds, after which the next copy of a waiting message comes.
LONGEST_COPY_DELAY = 60.0
#: By how much later, in seconds, for each message that waits before it. So the copies of a long line do not fill the queue.
_FOR_EACH_BEFORE = 0.05
#: Shortest delay of a copy, in seconds.
_SHORTEST = 0.01
#: Seconds in which a worker must say whether its pool can terminate tasks.
_PATIENCE = 1.0


def place_of(attempt: Attempt) -> Place | None:
    """Return the place in line of a delivery; None where the line does not count."""
    request, state, policy = attempt.request, attempt.retry_state, cast(Any, attempt.options.on_duplicate)
    uses_line = isinstance(policy, Policy) and policy.uses_line
    if not state.ticket and not uses_line:
        return None
    may_stop = policy.stops_holder if isinstance(policy, Policy) else True
    # An own retry replaces nobody, but its redelivery may be that of a body that was replaced.
    is_other = not request.retries or attempt.is_redelivered
    place = Place(state.ticket, state.copy, stop=may_stop and is_other, identity=attempt.identity)
    quiet = getattr(policy, "quiet", 0.0)
    if not quiet or request.retries or request.is_eager or goes_to_several_queues(attempt.task.app, request):
        return place
    return place._replace(quiet=quiet, max_quiet=policy.max_quiet)


def publish_copy(attempt: Attempt, decision: Enqueue, result: AcquireResult) -> Place:
    """Publish the delayed copy of a message that begins to wait; return the place that the message joins the line with.

    Raises:
        Reject: the broker is unreachable, and delivers the message again.
        Exception: of the publication.
    """
    place, delay = place_to_join(attempt, decision, result)
    copied = attempt.retry_state._replace(
        ticket=place.ticket,
        copy=place.next_copy,
        waited=attempt.retry_state.waited + delay,
        original_id=attempt.request.id,
        ignore_result=attempt.ignores_result,
        expires=attempt.request.expires,
    )
    ending.publish_or_requeue(attempt, copy_of(attempt, delay, copied))
    if decision.terminate and result.holder:
        terminate(attempt, result.holder)
    return place


def place_to_join(attempt: Attempt, decision: Enqueue, result: AcquireResult) -> tuple[Place, float]:
    """Return the place that a message joins the line with, and the seconds after which its next copy is due."""
    state = attempt.retry_state
    asked = attempt.spec.place or Place()  # has a ticket, too, if the message found no room under another policy
    state = state._replace(ticket=state.ticket or asked.ticket or f"{attempt.identity}.{os.urandom(8).hex()}")
    delay = copy_delay(attempt, decision, result)
    following = state.copy + 1 + random.random()
    message = text_of(attempt, started_by(attempt, state))
    place = Place(
        state.ticket, state.copy, decision.room, decision.replace, following, delay + attempt.spec.ttl, message
    )
    place = place._replace(quiet=asked.quiet, max_quiet=asked.max_quiet, stop=decision.stop)
    return place._replace(gives_way=decision.gives_way, identity=attempt.identity), delay


def copy_delay(attempt: Attempt, decision: Enqueue, result: AcquireResult) -> float:
    """Return the seconds after which the next copy of a message that waits is due.

    That is the rest of a quiet time, a cooldown or a pause, if there is one: nobody's end starts the message then. It ends when
    the message expires.
    """
    rest = result.holder.remaining if result.holder and result.holder.state in ("cooldown", "paused") else 0.0
    interval = min(attempt.spec.ttl, LONGEST_COPY_DELAY) + result.ahead * _FOR_EACH_BEFORE
    delay = min(interval, result.quiet or rest or interval, decision.within, seconds_left(attempt.request.expires))
    return max(_SHORTEST, min(delay, LONGEST_DELAY))


def seconds_left(expires: Any) -> float:
    """Return the seconds until a message expires: infinity if it never does."""
    time_of = maybe_iso8601(expires) if expires else None
    return maybe_make_aware(time_of).timestamp() - time.time() if time_of else math.inf


def copy_of(attempt: Attempt, delay: float, state: RetryState) -> Any:
    """Return the signature that publishes a copy, which has a task id of its own, stores no result and does not expire."""
    delay_now = shortened(attempt.task.app, delay)
    copy = signature_of(attempt, delay_now, state._replace(due=time.time() + delay))
    return copy.set(task_id=uuid(), ignore_result=True, expires=None)


def started_by(attempt: Attempt, state: RetryState) -> Any:
    """Return the signature that publishes the message itself, with a number of its own: that of no delayed copy.

    It differs each time, between those of this copy and the next. A copy that is delivered again, as its worker has died,
    publishes the message once more: one of the two runs.
    """
    number = state.copy + 0.5 + 0.4 * random.random()
    own = state._replace(copy=number, original_id="", ignore_result=False, expires=None, due=0.0)
    return signature_of(attempt, None, own)


def terminate(attempt: Attempt, holder: Holder) -> None:
    """Have the holder's worker terminate it, if its pool can; else, or if the worker cannot be asked, go on waiting."""
    log = attempt.log(holder)
    arguments = {"task_id": holder.task_id, "replacement": attempt.request.id}
    try:
        log.warning("has %s terminated, which did not stop", holder)
        answers = remote.ask(attempt.task.app, remote.REPLACE, [holder.node], _PATIENCE, arguments)
    except Exception as failure:  # the broker; the next copy tries again
        log.warning("could not have %s terminated: %r", holder, failure)
        return
    if not answers:
        log.warning("%s did not answer within %g s", holder.node, _PATIENCE)
    elif [{holder.node: {"error": remote.CANNOT_TERMINATE}}] == answers:
        log.warning("waits, as its pool cannot terminate %s", holder)


def leave(attempt: Attempt) -> None:
    """Take a message out of the line, and publish the next one if it was its turn.

    Raises:
        StoreError: the store is unreachable, or refused.
    """
    publish_next(attempt.task.app, attempt.store.leave(attempt.spec, attempt.ticket))


def leave_line(
    task: Any, config: TaskConfig, state: RetryState, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Take a message that no worker will start out of the line, and publish the next one if it was its turn."""
    digest, limit = config.digest(args, kwargs), config.limit(args, kwargs)
    spec = LeaseSpec(config.base, digest, LINE_TOKEN, config.options.lock_ttl, queued=True, limit=limit)
    publish_next(task.app, context_of(task.app).store.leave(spec, state.ticket))
