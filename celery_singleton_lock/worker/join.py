"""Lets a duplicate end with the result of its holder.

The message follows the holder's task id: it is published again with a delay, reads that task's result when it comes back, and
goes on like that until there is one. Nothing is stored for it meanwhile. A task that ends without a result has vanished, or
ignores it: then the lock is free, and the message runs the body itself. It does so only when it has found the lock free twice, as
a holder releases its lock a moment before its result is stored. A task that ends with `Task.replace` has released its lock, too,
and its replacement stores the result under the same id: a note in the store tells of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from celery.exceptions import Retry, WorkerLostError
from celery.states import PENDING, READY_STATES, RETRY, SUCCESS

from celery_singleton_lock.delivery import ending
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.decision import decide, policy_of
from celery_singleton_lock.delivery.delays import shortened
from celery_singleton_lock.delivery.republish import signature_of
from celery_singleton_lock.errors import ConfigurationError, DuplicateTask, StoreError
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.policies.decisions import Fail, Follow
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus

#: Shortest time in seconds for which the lock is free, without a result, before the body runs again.
_SHORTEST_FREE = 1.0
#: State of a task whose result could not be read now.
_UNKNOWN = ""
#: What Celery stores for a task whose worker died, or has ended it in a cold shutdown (as RETRY, without a message to come).
_VANISHED = (WorkerLostError, Retry)


class Joined(NamedTuple):
    """How a message that follows another task has ended."""

    result: Any


def refuse_unreadable_results(task: Any) -> None:
    """Refuse a task whose results workers cannot read.

    Raises:
        ConfigurationError: it has no result backend, or one whose results go to the caller alone, or stay in one process.
    """
    uri = task.backend.as_uri()
    shown = "cache+memory://" if uri.startswith("memory:") else uri  # as users spell it
    shared_locks = task.app.conf.get("singleton_lock_url") != "memory://"
    if uri.startswith(("disabled:", "rpc:", *(["memory:"] if shared_locks else []))):
        raise ConfigurationError(
            f"task {task.name}: on_duplicate='join' needs a result backend that workers can read, not {shown}"
        )


def follow(attempt: Attempt, decision: Follow, holder: Holder) -> Any:
    """Have the message of a duplicate follow its holder; return the result if that has ended, during its cooldown.

    Raises:
        ConfigurationError: no result could be read.
        DuplicateTask: the holder waits for this task, or may do so.
        Ignore, Reject: the end of this delivery, as Celery's tracer expects it.
        Exception: the holder's error.
    """
    refuse_unreadable_results(attempt.task)
    if holder.state == "cooldown":
        found = _result(attempt, holder.task_id)
        if isinstance(found, Joined):
            return found.result
    elif holder.task_id in (attempt.request.parent_id, attempt.request.root_id):
        error = DuplicateTask(attempt.spec.lock, holder)
        attempt.log(holder).warning("failed, as it would wait for a task that sent it: %s", error)
        raise error
    attempt.log(holder).info("follows task %s: it ends with its result", holder.task_id)
    _follow_on(attempt, decision.delay, holder)


def join(attempt: Attempt) -> Joined | None:
    """End a message with the result of the task that it follows, or follow on; return None if it is to acquire the lock.

    Raises:
        DuplicateTask: it has followed for too long.
        Ignore, Reject: it follows on.
        Exception: the error of the task that it follows.
    """
    state, spec = attempt.retry_state, attempt.spec
    found = _result(attempt, state.follows)
    if isinstance(found, Joined):
        return found
    holder: Holder | None = Holder(state.follows)
    if found not in (RETRY, _UNKNOWN):  # before its retry the lock may be free, or another task's
        followed = replace(spec, task_id=state.follows)
        try:
            holder = attempt.store.holder(spec.lock)
            if holder is None and attempt.store.keep_continued(followed):
                holder = Holder(state.follows)
        except StoreError as error:
            attempt.context.outages.log(attempt.log(), "follows on, its lock unknown: %s", error)
    if state.was_free_before if holder is None else holder.task_id == attempt.request.id:
        return None
    known = holder or Holder(state.follows)
    policy = policy_of(attempt.task, attempt.options, known)
    _, decision = decide(attempt, policy, AcquireResult(AcquireStatus.REFUSED, known))
    if isinstance(decision, Fail):
        ending.fail(attempt, DuplicateTask(spec.lock, known))
    if not isinstance(decision, Follow):  # the task has another policy now
        return None
    delay = decision.delay if holder else max(decision.delay, _SHORTEST_FREE)
    _follow_on(attempt, delay, known, was_free_before=holder is None)


def _follow_on(attempt: Attempt, delay: float, holder: Holder, was_free_before: bool = False) -> NoReturn:
    """Publish the message again with a delay, and end this delivery."""
    delay, state = shortened(attempt.task.app, delay), attempt.retry_state
    following = state._replace(
        waited=state.waited + delay, ticket="", copy=0.0, follows=holder.task_id, was_free_before=was_free_before
    )
    error = DuplicateTask(attempt.spec.lock, holder)
    ending.publish_or_requeue(attempt, signature_of(attempt, delay, following), error)
    ending.drop("follows another task")


def _result(attempt: Attempt, task_id: str) -> Joined | str:
    """Return how a task has ended, or its state; one whose worker died has not ended.

    Raises:
        Exception: the task's error.
    """
    try:
        found: Mapping[str, Any] = attempt.task.backend.get_task_meta(task_id)
    except Exception as failure:
        attempt.log().warning("could not read the result of %s: %s", task_id, failure)
        return _UNKNOWN
    state: str = found["status"]
    result = found["result"]
    if isinstance(result, _VANISHED):
        return str(PENDING)
    if state not in READY_STATES:
        return state
    attempt.log().info("ends as task %s did: %s", task_id, state)
    if state != SUCCESS:
        raise result
    return Joined(result)
