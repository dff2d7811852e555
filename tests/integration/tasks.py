"""The tasks of the integration tests: ``make_app`` builds the same app in tests and in workers.

A body does what the test tells it through ``acts``: the first run of a tag does the first act, the
second run the second, and so on; the last act is repeated. ``tag`` alone makes the lock key,
so a test can send a duplicate that would do something else.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import logging
import math
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery, Task, current_task, shared_task, signals
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

from celery_singleton_lock import (
    Debounce,
    Holder,
    Join,
    MaxStarts,
    Raise,
    Replace,
    RetryLater,
    RunOnceMore,
    SingletonTask,
    Skip,
    TooManyStarts,
    Wait,
)
from celery_singleton_lock import signals as lock_signals
from tests.integration.recorder import Recorder

#: Maximum seconds for which a body waits for its test.
HOLD = 150.0

#: Short delays for tests; a real policy would wait longer.
SOON = RetryLater(delay=0.2, backoff=1.0, max_delay=0.2, jitter=0.0, max_wait=600.0)

#: Seconds of a quiet time: longer than a moment of slowness between two calls.
QUIET = 8.0


class Boom(Exception):
    """A body's own failure."""


class Odd:
    """An argument of a type that lock keys refuse, and whose repr shows its value."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __repr__(self) -> str:
        return f"Odd({self.secret})"


def recorder_of(app: Celery) -> Recorder:
    """Return the recorder of the app's run."""
    return Recorder(app.conf.get("test_directory"))


# -- acts of a body ------------------------------------------------------------------------------


def _hold(task: Task, tag: str, seconds: float) -> str:
    recorder_of(task.app).wait_for_flag(f"{tag}.go", HOLD)
    return "held"


def _hold_own(task: Task, tag: str, seconds: float) -> str:
    """Wait until this body is let go, or all bodies of the tag."""
    recorder, end = recorder_of(task.app), time.monotonic() + HOLD
    while time.monotonic() < end and not any(recorder.is_raised(f"{name}.go") for name in (tag, task.request.id)):
        time.sleep(0.02)
    return "held"


def _hold_raise(task: Task, tag: str, seconds: float) -> str:
    _hold(task, tag, seconds)
    raise Boom(tag)


def _hold_watching(task: Task, tag: str, seconds: float) -> str:
    """Sleep in small steps, and record once when the lease is no longer held."""
    recorder, end = recorder_of(task.app), time.monotonic() + (seconds or HOLD)
    told = False
    while time.monotonic() < end and not recorder.is_raised(f"{tag}.go"):
        if not told and not task.lease.held:
            recorder.note(tag, "not-held")
            told = True
        time.sleep(0.05)
    return "supervised"


def _hold_looking(task: Task, tag: str, seconds: float) -> str:
    """Sleep in small steps, and record at each whether the lease is held."""
    recorder, end = recorder_of(task.app), time.monotonic() + (seconds or HOLD)
    while time.monotonic() < end and not recorder.is_raised(f"{tag}.go"):
        recorder.note(tag, "held" if task.lease.held else "not-held")
        time.sleep(0.05)
    return "looked"


def _obey(task: Task, tag: str, seconds: float) -> str:
    """Go on for a moment after the lease is no longer held, and return."""
    while task.lease.held:
        time.sleep(0.02)
    recorder_of(task.app).note(tag, "not-held")
    time.sleep(seconds)
    return "obeyed"


def _obey_later(task: Task, tag: str, seconds: float) -> str:
    """Go on until the body is let go after the lease is no longer held, and return."""
    while task.lease.held:
        time.sleep(0.02)
    recorder_of(task.app).note(tag, "not-held")
    _hold(task, tag, seconds)
    return "obeyed"


def _ensure(task: Task, tag: str, seconds: float) -> str:
    """Ask the lease again and again, as a body does before each step."""
    while True:
        task.lease.ensure()
        time.sleep(0.02)


def _sleep(task: Task, tag: str, seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def _sleep_swallowing(task: Task, tag: str, seconds: float) -> str:
    """Ignore a raised exception, like a body with a bare ``except``, until the body is let go."""
    recorder, end = recorder_of(task.app), time.monotonic() + (seconds or HOLD)
    while time.monotonic() < end and not recorder.is_raised(f"{tag}.go"):
        try:
            time.sleep(0.05)
        except BaseException as wish:
            recorder.note(tag, "swallowed", error=type(wish).__name__)
    return "swallowed"


def _spin(task: Task, tag: str, seconds: float) -> str:
    """Compute without waiting: in gevent and eventlet no other greenlet runs meanwhile."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        count += 1
    return "spun"


def _regex(task: Task, tag: str, seconds: float) -> str:
    """Match one regular expression that keeps the GIL for at least ``seconds``."""
    length, took = 16, 0.0
    while took < 0.05:
        length += 1
        took = min(_match(length) for _ in range(3))
    recorder_of(task.app).note(tag, "regex")
    length += math.ceil(math.log2(1.1 * seconds / took))  # each additional letter doubles the time
    while _match(length) < seconds:
        length += 1
    return "matched"


def _match(length: int) -> float:
    begin = time.thread_time()
    re.match(r"(a+)+$", "a" * length + "b")
    return time.thread_time() - begin


def _keep_gil(task: Task, tag: str, seconds: float) -> str:
    """Call C code that keeps the GIL, like a badly written extension."""
    library = ctypes.PyDLL(None)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        library.usleep(int((end - time.monotonic()) * 1e6))
    return "kept"


def _keep_gil_often(task: Task, tag: str, seconds: float) -> str:
    """Keep the GIL repeatedly for longer than a TTL of 2 s, with short pauses for other threads.

    A pause is long enough for a thread to send something, and too short to read the answer in time.
    """
    library = ctypes.PyDLL(None)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        while (left := begin + 2.4 - time.monotonic()) > 0:
            library.usleep(int(left * 1e6))
        time.sleep(0.0001)
    return "kept"


def _raise(task: Task, tag: str, seconds: float) -> str:
    raise Boom(tag)


def _raise_undecodable(task: Task, tag: str, seconds: float) -> str:
    raise FileNotFoundError("caf\udce9")


def _ignore(task: Task, tag: str, seconds: float) -> str:
    raise Ignore


def _reject(task: Task, tag: str, seconds: float) -> str:
    raise Reject("no", requeue=False)


def _retry(task: Task, tag: str, seconds: float) -> str:
    raise task.retry(countdown=seconds)


def _exit(task: Task, tag: str, seconds: float) -> str:
    sys.exit(3)


def _die(task: Task, tag: str, seconds: float) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "dead"


def _copy_request(task: Task, tag: str, seconds: float) -> str:
    """Copy and pickle the whole request, like code that logs or forwards requests."""
    lease, request = task.lease, task.request.__dict__
    copied, pickled = copy.deepcopy(request), pickle.dumps(request)
    shown = f"{copied} {pickle.loads(pickled)}".encode() + pickled + pickle.dumps(copied)
    assert lease.held
    return "a token was shown" if lease._state.spec.token.encode() in shown else "copied"


def _hold_retry(task: Task, tag: str, seconds: float) -> str:
    _hold_own(task, tag, 0.0)
    raise task.retry(countdown=2)


def _retry_other(task: Task, tag: str, seconds: float) -> str:
    """Retry with arguments that make another lock key."""
    raise task.retry(args=(f"{tag}-other",), kwargs={"acts": "return"}, countdown=seconds)


def _publish_self(task: Task, tag: str, seconds: float) -> str:
    return f"published {task.delay(tag).id}"


def _publish_and_hold(task: Task, tag: str, seconds: float) -> str:
    """Publish the same task, as a body does that wants to wait for it."""
    recorder_of(task.app).note(tag, "published", id=task.delay(tag).id)
    return _hold(task, tag, seconds)


def _hold_replace(task: Task, tag: str, seconds: float) -> str:
    """Wait, and end with another task, which waits under a tag of its own."""
    _hold(task, tag, 0.0)
    return str(task.replace(_stage(task, tag, "hold")))


def _hold_replace_raise(task: Task, tag: str, seconds: float) -> str:
    _hold(task, tag, 0.0)
    return str(task.replace(_stage(task, tag, "hold_raise")))


def _hold_replace_chain(task: Task, tag: str, seconds: float) -> str:
    _hold(task, tag, 0.0)
    return str(task.replace(_stage(task, tag, "hold") | task.app.tasks["then"].si(tag)))


def _hold_replace_self(task: Task, tag: str, seconds: float) -> str:
    """Wait, and end with the same task, which waits for two seconds."""
    _hold(task, tag, 0.0)
    return str(task.replace(task.s(tag, acts="sleep", seconds=2.0)))


def _stage(task: Task, tag: str, act: str) -> Any:
    return task.app.tasks["job.plain"].s(f"{tag}-stage", acts=act)


def _return(task: Task, tag: str, seconds: float) -> str:
    return "done"


ACTS: dict[str, Callable[[Task, str, float], str]] = {
    function.__name__[1:]: function
    for function in (
        _hold,
        _hold_own,
        _hold_raise,
        _hold_watching,
        _hold_looking,
        _obey,
        _obey_later,
        _ensure,
        _sleep,
        _sleep_swallowing,
        _spin,
        _regex,
        _keep_gil,
        _keep_gil_often,
        _raise,
        _raise_undecodable,
        _ignore,
        _reject,
        _retry,
        _exit,
        _die,
        _copy_request,
        _hold_retry,
        _retry_other,
        _publish_self,
        _publish_and_hold,
        _hold_replace,
        _hold_replace_raise,
        _hold_replace_chain,
        _hold_replace_self,
        _return,
    )
}


def perform(task: Task, tag: str, acts: str | Sequence[str], seconds: float = 0.0) -> str:
    """Do the next act, between a recorded ``start`` and ``end``."""
    recorder = recorder_of(task.app)
    number = recorder.number(tag)
    due = acts if isinstance(acts, str) else acts[min(number, len(acts) - 1)]
    recorder.note(tag, "start", number=number, act=due, **_circumstances(task))
    try:
        return ACTS[due](task, tag, seconds)
    except BaseException as error:
        recorder.note(tag, "error", number=number, error=type(error).__name__)
        raise
    finally:
        recorder.note(tag, "end", number=number, id=task.request.id)


def _circumstances(task: Task) -> dict[str, Any]:
    request = task.request
    lease = getattr(task, "lease", None)
    return {
        "id": request.id,
        "node": request.hostname,
        "retries": request.retries,
        "protected": getattr(lease, "protected", None),
        "held": getattr(lease, "held", None),
        "key": getattr(lease, "key", None),
    }


# -- contents of a message -----------------------------------------------------------------------


def request_details(task: Task) -> dict[str, Any]:
    """Return the parts of a request that a postponement must not change."""
    request = task.request
    delivery = request.delivery_info or {}
    return {
        "routing_key": delivery.get("routing_key"),
        "priority": delivery.get("priority"),
        "own headers": {k: v for k, v in (request.headers or {}).items() if k.startswith("x-")},
        "stamped_headers": request.stamped_headers,
        "stamps": request.stamps,
        "timelimit": list(request.timelimit or ()),
        "expires": bool(request.expires),
        "callbacks": [sig["task"] for sig in request.callbacks or ()],
        "errbacks": [sig["task"] for sig in request.errbacks or ()],
        "chain": [sig["task"] for sig in request.chain or ()],
        "argsrepr": request.argsrepr,
        "kwargsrepr": request.kwargsrepr,
        "ignore_result": request.ignore_result,
        "shadow": request.shadow,
        "retries": request.retries,
        "is own root": request.root_id == request.id,
        "reply_to": request.reply_to,
        "correlation": request.correlation_id == request.id,
    }


# -- hooks ---------------------------------------------------------------------------------------


class Hooked(SingletonTask):
    """Records which of Celery's hooks run, and for which tag."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self._hook("before_start", args, kwargs)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self._hook("on_success", args, kwargs)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._hook("on_failure", args, kwargs)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._hook("on_retry", args, kwargs, why=[type(exc).__name__, *exc.args[:1]])

    def after_return(self, status: Any, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._hook("after_return", args, kwargs)

    def _hook(self, name: str, args: Any, kwargs: Any, **more: Any) -> None:
        recorder_of(self.app).note(args[0] if args else kwargs["tag"], "hook", hook=name, **more)


class RudeCall(SingletonTask):
    """A user's base that overrides ``__call__`` without calling its parent."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class RudeBeforeStart(SingletonTask):
    """A user's base that overrides ``before_start`` without calling its parent."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        recorder_of(self.app).note(args[0] if args else kwargs["tag"], "before_start")


class RudeRunParent(SingletonTask):
    """A class-based task whose child replaces ``run``."""

    abstract = True

    def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        recorder_of(self.app).note(tag, "wrong run")
        return "wrong"


class RudeRun(RudeRunParent):
    """Overrides a concrete ``run`` without calling it."""

    name = "job.rude_run"
    unique_on = ("tag",)

    def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)


class RudeAll(RudeBeforeStart, RudeCall):
    """All three overrides, on a class-based task."""

    name = "job.rude_all"
    unique_on = ("tag",)

    def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)


class ClassBased(SingletonTask):
    """A class-based task."""

    name = "job.class_based"
    unique_on = ("tag",)

    def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)


class ToTheEnd(SingletonTask):
    """A user's base that runs the coroutine of ``run`` to its end."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(super().__call__(*args, **kwargs))


class Coroutine(ToTheEnd):
    """An asynchronous task."""

    name = "job.coroutine"
    unique_on = ("tag",)

    async def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)


class Awaitable(SingletonTask):
    """A task that returns a coroutine, which nobody runs to its end."""

    name = "job.awaitable"
    unique_on = ("tag",)

    def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> Any:
        return Coroutine.run(self, tag, acts, seconds)


class Nameless(SingletonTask):
    """A class-based task whose name Celery derives from its module and class."""

    unique_on = ("tag",)

    def run(self, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)


@shared_task(bind=True, base=SingletonTask, name="job.shared", unique_on=["tag"])
def shared(self: Task, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
    """A shared task, which belongs to every app."""
    return perform(self, tag, acts, seconds)


class Changing(SingletonTask):
    """A user's base that gives each message another argument, also one that is published again."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return super().apply_async(args, {**(kwargs or {}), "seconds": time.time() % 1 / 100}, **options)


class LateRetries(RedisBackend):
    """A result backend that stores RETRY only once the task has failed, or after half a second."""

    def _store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        end = time.monotonic() + 0.5
        while state == "RETRY" and time.monotonic() < end and self.get_state(task_id) != "FAILURE":
            time.sleep(0.01)
        return super()._store_result(task_id, result, state, *args, **kwargs)


# -- the app -------------------------------------------------------------------------------------


def no_publish(queue: str) -> str:
    """Return the flag that keeps the worker with this default queue from publishing."""
    return f"no-publish-{queue}"


class FragileCelery(Celery):
    """An app that cannot publish in a worker while the test has set its flag ``no_publish``."""

    in_worker = False

    def producer_or_acquire(self, *args: Any, **kwargs: Any) -> Any:
        if self.in_worker and recorder_of(self).is_raised(no_publish(self.conf.task_default_queue)):
            raise OperationalError("the broker takes no messages")
        return super().producer_or_acquire(*args, **kwargs)


def by_state(task: Task, holder: Holder) -> str:
    """Skip a duplicate of a message that waits, and fail one of a body that runs."""
    return "skip" if holder.state == "queued" else "raise"


#: Name of a job -> its task options. Each is ``job.<name>``, bound, with ``acts`` as its body.
JOBS: dict[str, dict[str, Any]] = {
    "plain": {"singleton": False},
    "skip": {"on_duplicate": "skip"},
    "skip_value": {"on_duplicate": Skip(result="already")},
    "retry": {"on_duplicate": SOON},
    "retry_default": {"on_duplicate": "retry"},
    "impatient": {"on_duplicate": RetryLater(delay=0.2, jitter=0.0, max_wait=0.7)},
    "hasty": {"on_duplicate": RetryLater(delay=0.01, jitter=0.0, max_wait=0.01)},
    "raising": {"on_duplicate": "raise"},
    "raise_object": {"on_duplicate": Raise()},
    "callable": {"on_duplicate": lambda task, holder: "raise" if holder.task_id else "skip"},
    "stingy": {"on_duplicate": SOON, "max_retries": 1, "default_retry_delay": 0},
    "skip_short": {"on_duplicate": "skip", "lock_ttl": 2},
    "skip_shortest": {"on_duplicate": "skip", "lock_ttl": 1},
    "told": {"on_duplicate": "skip", "lock_ttl": 2, "on_lock_lost": "raise"},
    "long": {"on_duplicate": "skip", "lock_ttl": 600},
    "soft_limit": {"lock_ttl": 600, "soft_time_limit": 1},
    "hard_limit": {"lock_ttl": 600, "time_limit": 1},
    "auto": {
        "on_duplicate": "raise",
        "autoretry_for": (Exception,),
        "max_retries": 3,
        "retry_backoff": False,
        "default_retry_delay": 0,
    },
    "auto_later": {
        "autoretry_for": (Boom,),
        "max_retries": 3,
        "default_retry_delay": 600,
        "lock_ttl": 600,
    },
    "own_retries": {"on_duplicate": Skip("already", own_retries=True)},
    "auto_own": {"autoretry_for": (Boom,), "max_retries": 3, "retry_backoff": False, "default_retry_delay": 10},
    "limit": {"lock_limit": 3, "on_duplicate": SOON},
    "limit_skip": {"lock_limit": 2, "lock_ttl": 600},
    "limit_by_plan": {"lock_limit": lambda tag: 2 if tag.endswith("paid") else 1},
    "limit_wait": {"lock_limit": 3, "on_duplicate": "wait", "lock_ttl": 4},
    "limit_wait_long": {"lock_limit": 3, "on_duplicate": "wait", "lock_ttl": 60},
    "limit_once_more": {"lock_limit": 2, "on_duplicate": "run_once_more", "lock_ttl": 60},
    "limit_publish": {"lock_limit": 2, "lock_from": "publish", "lock_ttl": 60},
    "limit_publish_wait": {"lock_limit": 2, "lock_from": "publish", "on_duplicate": "wait", "lock_ttl": 60},
    "limit_starts": {"lock_limit": 3, "max_starts": 1, "lock_ttl": 600},
    "late": {"acks_late": True, "on_duplicate": SOON},
    "comes_back": {"acks_late": True, "reject_on_worker_lost": True},
    "throttled": {"lock_ttl": 600, "lock_at_least": 600},
    "throttled_briefly": {"lock_ttl": 600, "lock_at_least": 3},
    "throttled_retry": {"lock_ttl": 600, "lock_at_least": 3, "on_duplicate": SOON},
    "capped": {"lock_ttl": 2, "lock_at_most": 3},
    "capped_long": {"lock_ttl": 600, "lock_at_most": 1200},  # a lease is renewed early as its cap comes near
    "capped_told": {"lock_ttl": 2, "lock_at_most": 3, "on_lock_lost": "raise"},
    "poison": {"acks_late": True, "reject_on_worker_lost": True, "max_starts": 2, "lock_ttl": 2},
    "once": {"max_starts": 1, "lock_ttl": 600},
    "once_limited": {"max_starts": 1, "lock_ttl": 600, "time_limit": 1},
    "tried": {"max_starts": MaxStarts(2, per=600, count="unsuccessful"), "autoretry_for": (TooManyStarts,)},
    "store_retry": {"on_duplicate": SOON, "on_store_error": "retry"},
    "store_retry_late": {"on_duplicate": SOON, "on_store_error": "retry", "acks_late": True},
    "store_auto": {"on_store_error": "raise", "autoretry_for": (Exception,)},
    "store_run": {"on_store_error": "run"},
    "store_run_wait": {"on_store_error": "run", "on_duplicate": "wait", "lock_ttl": 2},
    "store_raise": {"on_store_error": "raise"},
    "hooked": {"base": Hooked, "on_duplicate": "skip"},
    "hooked_retry": {"base": Hooked, "on_duplicate": SOON},
    "hooked_raise": {"base": Hooked, "on_duplicate": "raise"},
    "publish": {"lock_from": "publish"},
    "publish_raise": {"lock_from": "publish", "on_duplicate": "raise"},
    "publish_retry": {"lock_from": "publish", "on_duplicate": SOON},
    "publish_chosen": {"lock_from": "publish", "on_duplicate": by_state},
    "publish_until_start": {"lock_from": "publish", "lock_until": "start"},
    "publish_comes_back": {"lock_from": "publish", "acks_late": True, "reject_on_worker_lost": True},
    "publish_throttled": {"lock_from": "publish", "lock_ttl": 600, "lock_at_least": 600},
    "publish_run": {"lock_from": "publish", "on_store_error": "run"},
    "publish_strict": {"lock_from": "publish", "on_store_error": "raise"},
    "wait": {"on_duplicate": "wait", "lock_ttl": 4},
    "wait_long": {"on_duplicate": "wait", "lock_ttl": 60},
    "wait_short_ttl": {"on_duplicate": "wait", "lock_ttl": 1},
    "wait_little": {"on_duplicate": Wait(max_waiting=2), "lock_ttl": 60},
    "wait_brief": {"on_duplicate": "wait", "lock_ttl": 2},
    "wait_short": {"on_duplicate": Wait(max_wait=1.5), "lock_ttl": 1},
    "wait_late": {"on_duplicate": "wait", "lock_ttl": 4, "acks_late": True, "reject_on_worker_lost": True},
    "wait_once": {"on_duplicate": "wait", "lock_group": "wait_once", "lock_ttl": 60, "max_starts": 1},
    "wait_again": {"on_duplicate": "wait", "lock_group": "wait_once", "lock_ttl": 60},
    "wait_changing": {"base": Changing, "on_duplicate": "wait", "lock_ttl": 60},
    "once_more": {"on_duplicate": "run_once_more", "lock_ttl": 60},
    "once_more_latest": {"on_duplicate": RunOnceMore(keep="latest"), "lock_ttl": 60},
    "join": {"on_duplicate": "join"},
    "join_late": {"on_duplicate": "join", "acks_late": True, "reject_on_worker_lost": True, "lock_ttl": 3},
    "join_impatient": {"on_duplicate": Join(max_wait=1.5)},
    "join_silent": {"on_duplicate": "join", "ignore_result": True},
    "join_throttled": {"on_duplicate": "join", "lock_at_least": 600, "lock_ttl": 600},
    "join_publish": {"on_duplicate": "join", "lock_from": "publish"},
    "join_auto": {
        "on_duplicate": "join",
        "autoretry_for": (Exception,),
        "retry_backoff": False,
        "default_retry_delay": 0,
    },
    "replace": {"on_duplicate": Replace(grace=120), "lock_ttl": 60},
    "replace_short": {"on_duplicate": "replace", "lock_ttl": 1},
    "once_more_short": {"on_duplicate": "run_once_more", "lock_ttl": 1},
    "replace_told": {"on_duplicate": Replace(grace=120), "lock_ttl": 60, "on_lock_lost": "raise"},
    "replace_hard": {"on_duplicate": Replace(grace=2), "lock_ttl": 60},
    "replace_chosen": {"on_duplicate": lambda task, holder: Replace(grace=1.5), "lock_ttl": 60},
    "replace_impatient": {"on_duplicate": Replace(grace=120, max_wait=8), "lock_ttl": 1},
    "replace_late": {"on_duplicate": "replace", "lock_ttl": 60, "acks_late": True, "reject_on_worker_lost": True},
    "replace_auto": {"on_duplicate": "replace", "on_lock_lost": "raise", "autoretry_for": (Exception,)},
    "replace_throttled": {"on_duplicate": "replace", "lock_at_least": 4, "lock_ttl": 2},
    "replace_publish": {"on_duplicate": "replace", "lock_from": "publish", "on_lock_lost": "raise"},
    "debounce": {"on_duplicate": Debounce(quiet=QUIET, max_quiet=2 * QUIET), "lock_ttl": 60},
    "debounce_latest": {"on_duplicate": Debounce(QUIET, 2 * QUIET, "latest"), "lock_ttl": 60},
    "everything": {  # that goes together
        "unique_on": None,
        "lock_key": "{tag}",
        "lock_group": "everything",
        "on_duplicate": "wait",
        "lock_from": "publish",
        "lock_at_least": 1,
        "lock_at_most": 600,
        "on_lock_lost": "raise",
        "on_store_error": "run",
        "max_starts": MaxStarts(3, count="unsuccessful"),
        "lock_ttl": 60,
    },
    "rude_call": {"base": RudeCall},
    "rude_before_start": {"base": RudeBeforeStart},
}


def make_app(conf: dict[str, Any]) -> Celery:
    """Build the app of one test module.

    Args:
        conf: Celery's configuration, with ``test_directory`` (where to record) and, where
            spec, ``test_task_cls`` (whether every task of the app shall be a SingletonTask).
    """
    options: dict[str, Any] = {"task_cls": SingletonTask} if conf.get("test_task_cls") else {}
    # ``shared=False`` below: otherwise Celery adds these tasks to every app of the process.
    app = FragileCelery("tests", set_as_current=False, **options)
    app.conf.update(conf)
    readable = app.conf.result_backend != "disabled://"
    for name, job_options in JOBS.items():
        if readable or not name.startswith("join"):  # without results, a worker refuses to start with `Join`
            _add_job(app, name, job_options)
    for task in (ClassBased, Nameless, Coroutine, Awaitable, RudeRun, RudeAll):
        app.register_task(task())
    for add in (_add_followers, _add_secret_tasks, _add_group, _add_by_base, _add_django_task):
        add(app)
    return app


def _add_job(app: Celery, name: str, options: dict[str, Any]) -> None:
    own = {"base": SingletonTask, "unique_on": ["tag"], **options}

    def job(self: Task, tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)

    app.task(shared=False, bind=True, name=f"job.{name}", **own)(job)


def _add_followers(app: Celery) -> None:
    """Add plain tasks that follow a job in chains, chords and links."""
    recorder = recorder_of(app)

    @app.task(shared=False, name="then", base=Task)
    def then(tag: str) -> str:
        recorder.note(tag, "then")
        return f"then {tag}"

    @app.task(shared=False, name="collect", base=Task)
    def collect(results: Any, tag: str) -> Any:
        recorder.note(tag, "collect", results=results)
        return results

    @app.task(shared=False, name="errback", base=Task)
    def errback(request: Any, exc: Any, traceback: Any, tag: str) -> None:
        recorder.note(tag, "errback", id=request.id, error=type(exc).__name__)

    @app.task(shared=False, name="inspected", bind=True, base=SingletonTask, unique_on=["tag"],
              on_duplicate=SOON, max_retries=0)  # fmt: skip
    def inspected(self: Task, tag: str, hold: bool = False, secret: str = "", retry: bool = False) -> str:
        request = self.request
        own = {"details": request_details(self), "headers": dict(request.headers or {})}
        recorder.note(tag, "start", id=request.id, **own)
        if hold:
            recorder.wait_for_flag(f"{tag}.go", HOLD)
        if retry and not request.retries:
            raise self.retry(countdown=0, max_retries=1)
        return "inspected"


def _add_secret_tasks(app: Celery) -> None:
    """Add tasks whose second argument is secret; it is part of the lock key."""
    for policy in ("skip", "retry", "raise"):
        options = {"on_duplicate": SOON if policy == "retry" else policy}

        @app.task(shared=False, name=f"secret.{policy}", bind=True, base=SingletonTask, **options)
        def secret_task(self: Task, tag: str, secret: Any) -> str:
            return perform(self, tag, ["hold", "return"])

    @app.task(shared=False, name="secret.template", bind=True, base=SingletonTask, lock_key="{secret}")
    def by_template(self: Task, tag: str, secret: Any) -> str:
        return perform(self, tag, ["hold", "return"])


def _add_group(app: Celery) -> None:
    """Add two tasks that share their locks, of which the first has the default policy, and two with a limit."""
    options: dict[str, Any] = {"shared": False, "bind": True, "base": SingletonTask, "lock_group": "customers"}

    @app.task(name="group.bill", unique_on="customer", **options)
    def bill(self: Task, tag: str, customer: str, acts: Any = "return") -> str:
        return perform(self, tag, acts)

    @app.task(name="group.export", lock_key="{client}", on_duplicate=SOON, **options)
    def export(self: Task, tag: str, client: str, acts: Any = "return") -> str:
        return perform(self, tag, acts)

    options.update(lock_group="exports", lock_limit=3)

    @app.task(name="exports.orders", unique_on="customer", **options)
    def orders(self: Task, tag: str, customer: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)

    @app.task(name="exports.invoices", unique_on="client", **options)
    def invoices(self: Task, tag: str, client: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(self, tag, acts, seconds)


def _add_by_base(app: Celery) -> None:
    """Add tasks of other shapes: not bound, keyword-only, the app's own task class."""

    @app.task(shared=False, name="job.unbound", base=SingletonTask, unique_on="tag")
    def unbound(tag: str, acts: Any = "return", seconds: float = 0.0) -> str:
        return perform(current_task, tag, acts, seconds)

    @app.task(shared=False, name="job.of_app", bind=True)
    def of_app(self: Task, tag: str, acts: Any = "return") -> str:
        return perform(self, tag, acts)

    @app.task(shared=False, name="job.all_arguments", bind=True, base=SingletonTask, on_duplicate="raise")
    def all_arguments(self: Task, tag: str, acts: Any = "return", note: str = "x") -> str:
        return perform(self, tag, acts)


def _add_django_task(app: Celery) -> None:
    """Add a task with Django's base class, where Django is installed."""
    try:
        from celery_singleton_lock.contrib.django.task import SingletonDjangoTask
    except ImportError:
        return

    _add_job(app, "django", {"base": SingletonDjangoTask})


# -- records of a worker -------------------------------------------------------------------------


LOCK_SIGNALS = (
    *("lock_acquired", "lock_released", "lock_renewed", "lock_lost"),
    *("duplicate", "store_error"),
)


def lock_tag(key: str) -> str:
    """Return the tag under which the signals about one lock key are recorded."""
    return "lock-" + re.sub(r"\W", "_", key)


def record_signals(app: Celery) -> None:
    """Record the signals of Celery and of the library in a worker, under the task's id."""
    recorder = recorder_of(app)

    def celery_signal(name: str) -> Callable[..., None]:
        def receive(sender: Any = None, task_id: str | None = None, **kwargs: Any) -> None:
            request = kwargs.get("request")
            own_id = task_id or getattr(request or getattr(sender, "request", None), "id", None)
            recorder.note(f"signals-{own_id}", name, state=kwargs.get("state"))

        return receive

    for name in ("task_prerun", "task_postrun", "task_success", "task_failure", "task_retry"):
        getattr(signals, name).connect(celery_signal(name), weak=False)
    for name in LOCK_SIGNALS:
        getattr(lock_signals, name).connect(_lock_signal(recorder, name), weak=False)


def _lock_signal(recorder: Recorder, name: str) -> Callable[..., None]:
    def receive(sender: Any = None, **kwargs: Any) -> None:
        lease, holder = kwargs.get("lease"), kwargs.get("holder")
        key = kwargs.get("key") or getattr(lease, "key", None)
        recorder.note(
            lock_tag(key),
            name,
            key=key,
            task=getattr(sender, "name", None),
            task_id=kwargs.get("task_id"),
            policy=repr(kwargs.get("policy")),
            error=type(kwargs.get("error")).__name__,
            holder=getattr(holder, "task_id", None),
            pending=kwargs.get("pending"),
        )
        if recorder.is_raised(f"{lock_tag(key)}.angry"):
            raise Boom("a receiver of the user's")

    return receive


def chatty_library(**kwargs: Any) -> None:
    """Let the library log at every level, while Celery keeps its level."""
    logging.getLogger("celery_singleton_lock").setLevel(logging.DEBUG)
