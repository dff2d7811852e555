"""What becomes of a redelivered message while another delivery of it runs, or while its lock cools down."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from celery.states import SUCCESS

from celery_singleton_lock.config.options import Options
from celery_singleton_lock.delivery import ending
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.delivery.delays import shortened
from celery_singleton_lock.delivery.republish import signature_of
from celery_singleton_lock.errors import DuplicateTask
from celery_singleton_lock.log import about
from celery_singleton_lock.policies import RetryLater

FIRST_REDELIVERY_CHECK = 0.2  # seconds


def retry_policy_of(options: Options) -> RetryLater:
    """Return the policy that says how long a message is postponed."""
    return options.on_duplicate if isinstance(options.on_duplicate, RetryLater) else RetryLater()


def check_later(attempt: Attempt, error: DuplicateTask, shares_id: bool = False) -> NoReturn:
    """Publish a redelivered message again while its other delivery runs, and store nothing.

    Arguments:
        shares_id: it is another message with the task id of the one that runs.

    Raises:
        Ignore: it is published, or the other delivery succeeded.
        Reject: the broker is unreachable, and delivers the message again.
    """
    task, checks, log = attempt.task, attempt.retry_state.redelivery_checks, attempt.log(error.holder)
    delay = FIRST_REDELIVERY_CHECK * 2 ** min(checks, 64)
    delay = min(delay, max(retry_policy_of(attempt.options).delay, FIRST_REDELIVERY_CHECK))
    if error.holder.state == "cooldown":
        if stored_state(task, attempt.request) == SUCCESS:
            log.info("dropped: another delivery of it succeeded: %s", error)
            ending.drop("another delivery of this task succeeded")
        delay = max(delay, error.holder.remaining)
        log.info("redelivered, and no success of it is known: %s", error)
    elif shares_id:
        log.info("comes again, as another message with its task id runs: %s", error)
    else:
        log.info("redelivered while another delivery of it runs: %s", error)
    following = attempt.retry_state._replace(redelivery_checks=checks + 1)
    try:
        signature_of(attempt, shortened(task.app, delay), following).apply_async()
    except Exception as failure:
        if task.acks_late:
            time.sleep(FIRST_REDELIVERY_CHECK)  # the broker delivers it again at once
            ending.requeue(failure)
        log.error("lost this redelivery: %s", failure)
    ending.drop("another delivery of this task is running")


def stored_state(task: Any, request: Any) -> str:
    """Return the state that another delivery has stored. Its worker may have died between its release and that."""
    try:
        return str(task.backend.get_state(request.id))
    except Exception as failure:  # there may be no backend, or none that a worker can ask
        about(task, request.id).debug("has a state that is not known: %s", failure)
        return ""
