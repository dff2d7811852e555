"""What becomes of an attempt that does not get its lock. Every effect of a duplicate is in `refused`."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleton_lock import signals
from celery_singleton_lock.attempt import POSTPONED, attempt_of
from celery_singleton_lock.config import Options
from celery_singleton_lock.dropped import revoke_dropped
from celery_singleton_lock.errors import ConfigurationError, DuplicateTask, StoreError, StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.log import logger
from celery_singleton_lock.policy import Policy, RetryLater, Skip, as_policy
from celery_singleton_lock.report import send
from celery_singleton_lock.stores import Answer, Claim, Verdict

FIRST_LOOK = 0.2  # seconds until another attempt of the same task id is looked at again


class _Postponed(NamedTuple):
    """What became of a message so far, in a header of it.

    Arguments:
        times: how often it was published again as a duplicate, or because the store was away.
        waited: seconds of delay in all of these.
        looks: how often since then it was published again to see how another delivery of it ends.
    """

    times: int = 0
    waited: float = 0.0
    looks: int = 0


def refused(task: Any, request: Any, options: Options, claim: Claim, verdict: Verdict) -> Any:
    """Do with a duplicate what its policy says; answers the result where the caller is to return one.

    Raises:
        DuplicateTask: the policy is to raise, or has waited long enough.
        Ignore, Retry, Reject: to tell Celery's tracer that all is done.
    """
    holder = verdict.holder or Holder()
    if verdict.answer is Answer.ENDED:
        logger.info(
            "Task %s[%s] dropped: another delivery of it has held %s and succeeded", task.name, request.id, claim.lock
        )
        raise Ignore("another delivery of this task has succeeded")
    if holder.task_id == request.id and not request.is_eager:
        _look_again(task, request, options, claim, holder)
    policy = _policy(task, options, holder)
    send(signals.duplicate, task, key=claim.lock, task_id=request.id, holder=holder, policy=policy)
    if isinstance(policy, Skip):
        return _skip(task, request, policy, claim, holder)
    error = DuplicateTask(claim.lock, holder)
    if isinstance(policy, RetryLater):
        _postpone(task, request, policy, error)
    logger.warning("Task %s[%s] refused: %s is held by %s", task.name, request.id, claim.lock, holder)
    raise error


def unanswered(task: Any, request: Any, options: Options, key: str, error: StoreError) -> None:
    """The store could not be asked, or refused; returns where the body is to run unprotected.

    Raises:
        StoreError: it refused.
        StoreUnavailable: the option says so, or trying again later is not possible.
        Retry, Reject: it is tried again later.
    """
    logger.warning("Task %s[%s]: no lock %s: %s", task.name, request.id, key, error)
    send(signals.store_error, task, key=key, task_id=request.id, error=error)
    away = isinstance(error, StoreUnavailable)
    if away and options.on_store_error == "run":
        return
    if away and options.on_store_error == "retry":
        policy = options.on_duplicate if isinstance(options.on_duplicate, RetryLater) else RetryLater()
        _postpone(task, request, policy, error)
    raise error


def _policy(task: Any, options: Options, holder: Holder) -> Policy:
    chosen = options.on_duplicate
    if not callable(chosen):
        return chosen
    policy = as_policy(answer := chosen(task, holder))
    if policy is None:
        raise ConfigurationError(f"task {task.name}: on_duplicate returned {answer!r}, which is no policy")
    return policy


def _skip(task: Any, request: Any, policy: Skip, claim: Claim, holder: Holder) -> Any:
    logger.info("Task %s[%s] skipped: %s is held by %s", task.name, request.id, claim.lock, holder)
    if request.is_eager:
        request.callbacks = None
        return policy.result
    revoke_dropped(task, request)
    task.backend.mark_as_done(request.id, policy.result, request, not _ignores_result(task, request))
    if attempt_of(request).events:
        _send_event(task, request, claim, holder)
    raise Ignore("skipped as a duplicate")


def _send_event(task: Any, request: Any, claim: Claim, holder: Holder) -> None:
    try:
        task.send_event("task-singleton-skipped", key=claim.lock, holder=holder.as_dict())
    except Exception as error:  # the task has been stored as done: it must not fail now
        logger.warning("Task %s[%s]: no event could be sent: %s", task.name, request.id, error)


def _postpone(task: Any, request: Any, policy: RetryLater, error: Exception) -> None:
    """Publish the task again; returns where it has waited long enough, or runs in the caller.

    Raises:
        Retry: it was published.
        Reject: it could not be published, but its message can go back to the broker.
        Exception: it could not be published: the given error.
    """
    times, waited, _ = _postponed(request)
    if request.is_eager or waited >= policy.max_wait:
        return
    delay = policy.delay_for(times, waited)
    again = _again(task, request, delay, _Postponed(times + 1, waited + delay))
    _publish(task, again, error)
    logger.info("Task %s[%s] waits %.1f s: %s", task.name, request.id, delay, error)
    raise Retry(when=delay, sig=again)


def _look_again(task: Any, request: Any, options: Options, claim: Claim, holder: Holder) -> NoReturn:
    """Another delivery of this very message runs: leave its state alone, and come back to see how it ended."""
    before = _postponed(request)
    longest = options.on_duplicate.delay if isinstance(options.on_duplicate, RetryLater) else RetryLater.delay
    delay = min(FIRST_LOOK * 2 ** min(before.looks, 64), max(longest, FIRST_LOOK))
    logger.info(
        "Task %s[%s] is running in another delivery of it: %s is held by %s", task.name, request.id, claim.lock, holder
    )
    try:
        again = _again(task, request, delay, before._replace(looks=before.looks + 1))
        _publish(task, again, DuplicateTask(claim.lock, holder))
    except DuplicateTask as error:
        logger.error("Task %s[%s]: this delivery of it is lost: %s", task.name, request.id, error.__cause__)
    raise Ignore("another delivery of this task is running")


def _postponed(request: Any) -> _Postponed:
    found = (request.headers or {}).get(POSTPONED) or {}
    return _Postponed(int(found.get("times", 0)), float(found.get("waited", 0)), int(found.get("looks", 0)))


def _again(task: Any, request: Any, delay: float, postponed: _Postponed) -> Any:
    """The message as it came, with what `Task.signature_from_request` (5.7) leaves out."""
    headers = {**(request.headers or {}), POSTPONED: postponed._asdict()}
    options = {
        "countdown": delay,
        "retries": request.retries,
        "headers": headers,
        "ignore_result": _ignores_result(task, request),
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
        "serializer": _serializer_of(attempt_of(request).content_type) or task.serializer,
    }
    if request.get("compression"):
        options["compression"] = request.get("compression")
    return task.signature_from_request(request, **options)


def _publish(task: Any, signature: Any, error: Exception) -> None:
    try:
        signature.apply_async()
    except Exception as reason:
        if task.acks_late and isinstance(
            reason, (OperationalError, OSError)
        ):  # the broker is away; others would return for ever
            raise Reject(reason, requeue=True) from reason
        raise error from reason


def _ignores_result(task: Any, request: Any) -> bool:
    """As `celery.app.task.get_actual_ignore_result` (5.7): the request's class has a default that says nothing."""
    asked = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if asked is None else asked)


def _serializer_of(content_type: str | None) -> str:
    """Kombu's name of the serializer that wrote a body of this type; empty where there is none."""
    return str(registry.type_to_name.get(content_type, ""))
