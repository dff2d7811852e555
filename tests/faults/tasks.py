"""The tasks of the fault matrix: ``make_app`` builds the same app in the test and in its workers.

``tag`` alone makes the lock key. ``acts`` lists what bodies do: the first run of a message does the first act, and so on. The
last act is repeated.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery, Task
from celery.signals import task_failure, task_received

from celery_singleton_lock import (
    Debounce,
    Join,
    LockLost,
    MaxStarts,
    Raise,
    Replace,
    RetryLater,
    RunOnceMore,
    SingletonTask,
    Skip,
    TooManyStarts,
    Wait,
    signals,
)
from celery_singleton_lock.policies import Policy
from celery_singleton_lock.policies import name_of as name_of_policy
from tests.faults.ledger import Ledger, name_of, now

#: Maximum seconds that a body waits for its test.
HOLD = 100.0
#: Seconds of a body without work, long enough for a probe of the store to see its lease.
BRIEF = 0.15
#: Seconds for which a lingering task occupies its process after its body.
LINGER = 8.0
#: Short delays for tests; a real policy would wait longer.
SOON = RetryLater(delay=0.3, backoff=1.0, max_delay=0.3, jitter=0.0, max_wait=600.0)
#: How many bodies of a task with a limit may run at once.
SEVERAL = 3
#: Options of tasks that acknowledge their messages when the body has ended.
LATE = {"acks_late": True, "reject_on_worker_lost": True}


class Boom(Exception):
    """A body's own failure."""


class Bang(BaseException):
    """A BaseException, which no body should raise."""


def ledger_of(app: Celery) -> Ledger:
    """Return the ledger of the app's run."""
    return Ledger(app.conf.get("faults_directory"))


# -- acts of a body ------------------------------------------------------------------------------


def _sleep(task: Task, tag: str, seconds: float = BRIEF) -> str:
    """Sleep in parts, because a signal just before a call does not interrupt that call: its handler runs after it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
    return "slept"


def _heed(task: Task, tag: str, seconds: float) -> str:
    """Sleep while the lease is held: a body that can be ended at any point, and ends when its lease is lost."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and task.lease.held:
        time.sleep(min(left, 0.02))
    return "heeded"


def _hold(task: Task, tag: str, flag: str = "go") -> str:
    ledger, end = ledger_of(task.app), time.monotonic() + HOLD
    while not ledger.is_raised(f"{tag}.{flag}") and time.monotonic() < end:
        time.sleep(0.02)
    return "held"


def _hold_boom(task: Task, tag: str) -> None:
    _hold(task, tag)
    raise Boom(tag)


def _hold_exit(task: Task, tag: str) -> None:
    _hold(task, tag)
    sys.exit(3)


def _swallow(task: Task, tag: str, seconds: float) -> str:
    """Continue after every raised exception, like a body with a bare ``except``."""
    ledger, end, told = ledger_of(task.app), time.monotonic() + seconds, False
    while True:
        try:
            if not told:
                told = True
                ledger.note("swallowing", tag=tag)
            while time.monotonic() < end:
                time.sleep(0.05)
            return "swallowed"
        except BaseException as wish:
            ledger.note("swallowed", tag=tag, error=type(wish).__name__)


def _ensure(task: Task, tag: str, seconds: float = HOLD) -> str:
    """Call ``ensure`` at each step, and end when the lease is lost."""
    ledger, end = ledger_of(task.app), time.monotonic() + seconds
    while time.monotonic() < end and not ledger.is_raised(f"{tag}.go"):
        asked = now()
        try:
            task.lease.ensure()
        except LockLost:
            ledger.note("ensure failed", tag=tag)
            raise
        ledger.note("ensured", tag=tag, asked=asked)
        time.sleep(0.05)
    return "ensured"


def _watch(task: Task, tag: str) -> str:
    """Record when the lease is no longer held, by its own clock."""
    while task.lease.held:
        time.sleep(0.02)
    ledger_of(task.app).note("not held", tag=tag)
    return _hold(task, tag)


def _regex(task: Task, tag: str, seconds: float) -> str:
    """Match one regular expression that keeps the GIL for at least ``seconds``."""
    length, took = 16, 0.0
    while took < 0.05:
        length += 1
        took = min(_match(length) for _ in range(3))
    ledger_of(task.app).note("regex", tag=tag)
    length += math.ceil(math.log2(seconds / took))  # each additional letter doubles the time
    while _match(length) < seconds:
        length += 1
    return "matched"


def _keep_gil(task: Task, tag: str, seconds: float) -> str:
    """Call C code that keeps the GIL, like a badly written extension."""
    library, end = ctypes.PyDLL(None), time.monotonic() + seconds
    while time.monotonic() < end:
        library.usleep(int((end - time.monotonic()) * 1e6))
    return "kept"


def _spin(task: Task, tag: str, seconds: float) -> int:
    """Compute without waiting: in gevent and eventlet no other greenlet runs meanwhile."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        count += 1
    return count


def _match(length: int) -> float:
    begin = time.thread_time()
    re.match(r"(a+)+$", "a" * length + "b")
    return time.thread_time() - begin


def _boom(task: Task, tag: str) -> None:
    time.sleep(BRIEF)
    raise Boom(tag)


def _bang(task: Task, tag: str) -> None:
    time.sleep(BRIEF)
    raise Bang(tag)


def _exit(task: Task, tag: str) -> None:
    time.sleep(BRIEF)
    sys.exit(3)


def _memory(task: Task, tag: str) -> None:
    time.sleep(BRIEF)
    raise MemoryError(tag)


def _eat(task: Task, tag: str, megabytes: int) -> int:
    """Use more memory than a child may."""
    eaten = bytearray(megabytes << 20)
    eaten[::4096] = b"x" * len(eaten[::4096])
    return len(eaten)


def _odd_result(task: Task, tag: str) -> object:
    """Return an object that no serializer accepts."""
    time.sleep(BRIEF)
    return object()


def _fork(task: Task, tag: str, seconds: float = 0.3) -> str:
    """Fork, and hold on once the child has ended, like ordinary code; it records its number of threads."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            time.sleep(seconds)
            ledger_of(task.app).note("forked", threads=len(os.listdir("/proc/self/task")))
        os._exit(0)
    os.waitpid(pid, 0)
    return _hold(task, tag)


def _fork_through(task: Task, tag: str) -> str:
    """Fork, and hold on; the child leaves the body like the parent, and must not release the lock."""
    if not os.fork():
        raise Bang("a copy of the body")
    return _hold(task, tag)


def _call(task: Task, tag: str, other: str, other_tag: str) -> Any:
    """Run another task within this one as a plain call."""
    result = task.app.tasks[other](other_tag, acts=[["sleep", 0.2]])
    _sleep(task, tag, 1.2)
    return result


def _apply(task: Task, tag: str, other: str, other_tag: str) -> str:
    """Run a task within this one as an eager task."""
    state = str(task.app.tasks[other].apply((other_tag,), {"acts": [["sleep", 0.2]]}).state)
    _sleep(task, tag, 1.2)
    return state


def _wall_clock(task: Task, tag: str, seconds: float) -> str:
    """Sleep, and record when the wall clock is set."""
    ledger, end, before = ledger_of(task.app), time.monotonic() + seconds, time.time() - time.monotonic()
    ledger.note("clock seen")
    while time.monotonic() < end:
        step = time.time() - time.monotonic() - before
        if abs(step) > 60:
            ledger.note("wall clock", step=round(step / 60) * 60)
            before += step
        time.sleep(0.05)
    return "slept"


ACTS: dict[str, Callable[..., Any]] = {
    function.__name__[1:].replace("_", "-"): function
    for function in (
        _sleep, _heed, _hold, _hold_boom, _hold_exit, _swallow, _ensure, _regex, _boom, _bang, _exit, _memory, _eat, _odd_result,
        _fork, _fork_through, _call, _apply, _wall_clock, _spin, _watch, _keep_gil,
    )
}  # fmt: skip


def _body(task: Task, tag: str, acts: Sequence[Sequence[Any]]) -> Any:
    """Do an act between the ``start`` and ``end`` events of this run."""
    ledger, lease, pid = ledger_of(task.app), task.lease, os.getpid()
    task_id = "" if _is_called_by_itself(task) else task.request.id or ""
    number = ledger.number(f"{task_id}.{task.name}.{tag}") if task_id else 0
    act, *args = acts[min(number, len(acts) - 1)]
    who = {
        "work": _work(task, tag),
        "key": lease.key or f"plain:{tag}",
        "run": _run_of(lease) if task_id else os.urandom(5).hex(),
        "task_id": task_id,
    }
    how = "return"
    try:  # an exception just after the first event is followed by the second
        ledger.note("start", tag=tag, number=number, parent=os.getppid(), **_bounds(task), **who)
        return ACTS[act](task, tag, *args)
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        if os.getpid() == pid:
            ledger.note("end", how=how, **who)


def _is_called_by_itself(task: Task) -> bool:
    """Tell whether a body of the same task made this plain call, which then has a copy of its request (Celery 5.7)."""
    stack = task.request_stack.stack
    return len(stack) > 1 and stack[-1].id == stack[-2].id


def _work(task: Task, tag: str) -> str:
    """Return the work of which bodies exclude each other, from the task's options and not from the lease."""
    request = task.request
    eager = request.is_eager and not task.app.conf.get("singleton_lock_eager", False)
    free = task.singleton is False or request.called_directly or eager or _is_called_by_itself(task)
    return f"{'plain ' if free else ''}{task.name} {tag}"


def _bounds(task: Task) -> dict[str, Any]:
    """Return what the task's options say of its bodies, as fields of the checker's `Body`."""
    starts, policy = task.max_starts, task.on_duplicate
    return {
        "limit": task.lock_limit or 1,
        "least": task.lock_at_least or 0.0,
        "most": task.lock_at_most or math.inf,
        "starts": (starts.n, starts.per) if starts else (math.inf, 0.0),
        "quiet": (policy.quiet, policy.max_quiet) if getattr(policy, "quiet", 0.0) else (0.0, 0.0),
    }


def _run_of(lease: Any) -> str:
    return name_of(lease._state.spec.token) if lease.protected else os.urandom(5).hex()


# -- the app -------------------------------------------------------------------------------------


def make_app(conf: dict[str, Any]) -> Celery:
    """Build the app with all tasks, the same in every process."""
    app = Celery("faults", set_as_current=False)
    app.conf.update(conf)
    for name, policy in (("skip", Skip()), ("retry", SOON), ("raise", Raise()), ("other", SOON)):
        _register(app, name, on_duplicate=policy)
    for name, policy in (("late", SOON), ("late-skip", Skip()), ("late-raise", Raise())):
        _register(app, name, on_duplicate=policy, **LATE)
    for name, policy in (
        ("wait", Wait()),
        ("once-more", RunOnceMore()),
        ("latest", RunOnceMore(keep="latest")),
        ("replace", Replace(grace=120)),
        ("join", Join()),
    ):
        _register(app, name, on_duplicate=policy)
        _register(app, f"late-{name}", on_duplicate=policy, **LATE)
        _register(app, f"publish-{name}", on_duplicate=policy, lock_from="publish")
        _register(app, f"late-publish-{name}", on_duplicate=policy, lock_from="publish", **LATE)
    _register(app, "late-quiet", on_duplicate=Debounce(quiet=0.5, max_quiet=2.0), **LATE)
    _register(app, "late-least", on_duplicate=Wait(), lock_at_least=1.5, **LATE)
    _register(app, "late-most", on_duplicate=SOON, lock_at_most=1.0, **LATE)
    _register(app, "late-starts", on_duplicate=SOON, max_starts=MaxStarts(1, per=10.0), **LATE)
    _register(app, "publish", on_duplicate=Skip(), lock_from="publish")
    _register(app, "publish-retry", on_duplicate=SOON, lock_from="publish")
    for name, policy in (("limit", SOON), ("limit-wait", Wait())):
        _register(app, name, on_duplicate=policy, lock_limit=SEVERAL)
        _register(app, f"late-{name}", on_duplicate=policy, lock_limit=SEVERAL, **LATE)
        _register(app, f"publish-{name}", on_duplicate=policy, lock_limit=SEVERAL, lock_from="publish")
    _register(app, "nameless", on_duplicate="skip", lock_key=_no_key)
    _register(app, "lingering", on_duplicate=SOON, after_return=_linger)
    _register(app, "plain", singleton=False)
    app.task(_next, bind=True, shared=False, name="next", base=SingletonTask, singleton=False)
    return app


def _register(app: Celery, name: str, **options: Any) -> None:
    def body(self: Task, tag: str, acts: Sequence[Sequence[Any]] = (("sleep",),)) -> Any:
        return _body(self, tag, acts)

    keyed = {} if "lock_key" in options else {"unique_on": "tag"}
    app.task(body, bind=True, shared=False, name=name, base=SingletonTask, **keyed, **options)


def _no_key(tag: str, acts: object = None) -> str:
    raise Boom("no key")


def _linger(self: Task, status: str, *args: Any) -> None:
    """Occupy the process for a while after the body's end and its release."""
    time.sleep(LINGER)


def _next(self: Task, result: object, tag: str) -> object:
    """The next step of a chain; records that it ran."""
    ledger_of(self.app).note("next", tag=tag, task_id=self.request.id)
    return result


def record_signals(app: Celery) -> None:
    """Record the library's signals in the ledger."""
    ledger = ledger_of(app)

    def of_lease(what: str) -> Callable[..., None]:
        def note(lease: Any, **_: Any) -> None:
            ledger.note(what, run=_run_of(lease), key=lease.key, task_id=lease._state.spec.task_id)

        return note

    def lost(lease: Any, **arguments: Any) -> None:
        """Record a loss, or that the holder is to stop: then it keeps its lock."""
        of_lease("stopped" if lease._state.stopped and not lease._state.lost else "lost")(lease)

    signals.lock_lost.connect(lost, weak=False)
    signals.lock_acquired.connect(of_lease("acquired"), weak=False)
    signals.lock_released.connect(of_lease("released"), weak=False)

    def duplicate(key: str, task_id: str, policy: Policy, **_: Any) -> None:
        ledger.note("duplicate", key=key, task_id=task_id, policy=name_of_policy(policy))

    signals.duplicate.connect(duplicate, weak=False)

    def received(request: Any, **_: Any) -> None:
        """Record only messages that a kill can lose: those with late acknowledgement are redelivered."""
        if not request.task.acks_late:
            ledger.note("received", task_id=request.id)

    def failed(task_id: str, exception: BaseException, **_: Any) -> None:
        if isinstance(exception, TooManyStarts):
            ledger.note("refused", task_id=task_id, key=exception.key)

    task_received.connect(received, weak=False)
    task_failure.connect(failed, weak=False)
    signals.store_error.connect(
        lambda key, task_id, error, **_: ledger.note("store error", key=key, task_id=task_id, error=str(error)[:200]),
        weak=False,
    )
