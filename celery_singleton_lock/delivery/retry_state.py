"""What a message that was published again carries of its past, in a header: how often, and how long it has waited."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER

#: Header of a message that was published again: the fields of its `RetryState`.
RETRY_STATE_HEADER = "singleton_retry_state"


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
    identity: str = ""  # of the message that is published again
    due: float = 0.0  # in a delayed copy: when the store is asked, in Unix time; a broker may not bear so long a delay

    @property
    def is_first(self) -> bool:
        """Whether the message comes for the first time."""
        return not (self.times or self.redelivery_checks or self.ticket or self.follows)


_FIRST = RetryState()


def retry_state_of(request: Any) -> RetryState:
    """Return how often the message of a request was published again."""
    # Not from `request.headers`: Datadog and older Sentry nest a dict in the headers, and Celery then shows only that one.
    found = request.get(RETRY_STATE_HEADER)
    if not found:
        return _FIRST
    return RetryState(**{name: found[name] for name in RetryState._fields if name in found})


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
