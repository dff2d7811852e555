"""The task class: what is locked, what is not, and what of users' own classes goes on working."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import celery
import pytest
from celery import Celery, Task, chain, chord, current_task, shared_task
from celery import signals as celery_signals
from celery.app.trace import build_tracer
from celery.contrib.abortable import AbortableTask
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock import (
    ConfigurationError,
    DuplicateTask,
    Holder,
    LockLost,
    SingletonMixin,
    SingletonTask,
    Skip,
    TooManyStarts,
    signals,
)
from celery_singleton_lock.testing import assert_free, assert_held, locked
from tests.unit.conftest import MakeApp

Singleton = Callable[..., Any]


def deliver(task: Any, *args: Any, task_id: str = "id-1", **request: Any) -> Any:
    """Run a task as a worker's process does, without a worker: answers the tracer's (result, info, runtime, retval)."""
    tracer = build_tracer(task.name, task, app=task.app)
    request.update(request.pop("headers", {}))  # as in a message, where they stand beside Celery's
    return tracer(task_id, args, {}, {"id": task_id, "hostname": "node", "args": args, "kwargs": {}, **request})


# -- locked and not locked ---------------------------------------------------------------------


def test_body_runs_under_its_lock(singleton: Singleton) -> None:
    """While the body runs its lock is held by this task; afterwards it is free."""
    seen = []

    @singleton(name="x", bind=True)
    def task(self: Any, a: int) -> int:
        seen.append((self.lease.held, self.lease.protected, self.lease.key, self.lock_holder(a)))
        return a

    assert 5 == deliver(task, 5).retval
    (held, protected, key, holder) = seen[0]
    assert (True, True, task.lock_key_for(5), "id-1", "node") == (held, protected, key, holder.task_id, holder.node)
    assert_free(task, 5)


def test_lease_without_bind(singleton: Singleton) -> None:
    """Without bind the lease is ``celery.current_task.lease``."""
    seen = []

    @singleton(name="x")
    def task() -> None:
        seen.append(current_task.lease.held)

    deliver(task)
    assert [True] == seen


def test_direct_call_is_not_locked(singleton: Singleton) -> None:
    """``task()`` is a plain function call: it runs though the lock is held, and its lease is unprotected."""
    seen = []

    @singleton(name="x", bind=True)
    def task(self: Any) -> str:
        seen.append(self.lease)
        self.lease.ensure()
        return "ran"

    with locked(task):
        assert "ran" == task()
    assert (False, False, 0.0) == (seen[0].held, seen[0].protected, seen[0].remaining)
    assert "ran" == task()
    assert_free(task)


def test_nested_direct_calls_are_not_locked(singleton: Singleton) -> None:
    """A body that calls its own task, or another, however deep, runs that as a plain function, and keeps its lock."""

    @singleton(name="inner", bind=True)
    def inner(self: Any, a: int) -> Any:
        return task(0) if a else self.lease.protected

    @singleton(name="x", bind=True)
    def task(self: Any, depth: int) -> list[Any]:
        before = self.lease
        found = [*task(depth - 1), inner(1), inner(0), *self(0)] if depth else [depth]
        assert before is self.lease or not before.protected
        return found

    with locked(inner, 0), locked(inner, 1), locked(task, 2), locked(task, 1), locked(task, 0):
        assert [0, [0], False, 0, [0], False, 0, [0], False, 0] == deliver(task, 3).retval
    assert_free(task, 3)


def test_task_called_from_the_body_of_its_base_is_not_locked(app: Celery) -> None:
    """A plain task that calls a singleton subclass of its own class calls a function, though both share a stack of requests."""

    class Plain(SingletonTask):
        name = "plain"
        singleton = False

        def run(self) -> bool:
            return bool(app.tasks["child"]())

    class Child(Plain):
        name = "child"
        singleton = True

        def run(self) -> bool:
            return bool(self.lease.protected)

    app.register_task(Plain())
    app.register_task(Child())
    assert deliver(app.tasks["plain"]).retval is False
    assert deliver(app.tasks["child"]).retval is True


def test_task_behind_a_proxy_is_locked(singleton: Singleton) -> None:
    """An integration may give the tracer a proxy of the task, as New Relic does."""

    class Proxy:
        def __init__(self, task: Any) -> None:
            self.__dict__["task"] = task

        def __getattr__(self, name: str) -> Any:
            return getattr(self.task, name)

        @property
        def __class__(self) -> Any:
            return type(self.task)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.task(*args, **kwargs)

    @singleton(name="x", bind=True)
    def task(self: Any) -> bool:
        return bool(self.lease.protected)

    assert deliver(Proxy(task)).retval is True
    with locked(task):
        assert isinstance(deliver(Proxy(task)).info.retval, Ignore)


@pytest.mark.parametrize("throws", [None, (), KeyError, [KeyError]])
def test_throws_of_the_user(singleton: Singleton, throws: Any) -> None:
    """``throws`` may be all that Celery takes; a failure stays what it was."""

    @singleton(name="x", throws=throws)
    def task() -> None:
        raise ValueError("mine")

    assert "mine" == str(deliver(task).info.retval)
    assert DuplicateTask in task.throws


class TestClassWithoutName:
    """A class-based task whose name Celery makes when it is registered."""

    def test_is_locked(self, app: Celery) -> None:
        """Its body runs under a lock, and a duplicate does not run."""

        class Nameless(SingletonTask):
            def run(self) -> bool:
                return bool(self.lease.protected)

        task = app.register_task(Nameless())
        assert task.name.endswith(".Nameless")
        assert deliver(task).retval is True
        with locked(task):
            assert isinstance(deliver(task).info.retval, Ignore)

    def test_bad_option_is_refused(self, app: Celery) -> None:
        """A wrong option is refused under the name that the task has."""

        class Nameless(SingletonTask):
            lock_ttl = 0

            def run(self) -> None: ...

        task = app.register_task(Nameless())
        with pytest.raises(ConfigurationError, match=r"Nameless: lock_ttl=0"):
            task.delay()

    def test_base_without_run_is_no_task(self, app: Celery) -> None:
        """A base class that names parameters of its subclasses can be asked for its app."""

        class Base(SingletonTask):
            unique_on = ("account",)

        Base.bind(app)
        assert Base.app is app


def test_map_items_are_not_locked(singleton: Singleton, app: Celery) -> None:
    """Items of map, starmap and chunks are direct calls: none is skipped as a duplicate."""

    @singleton(name="x")
    def task(a: int) -> int:
        return a * 2

    with locked(task, 1):
        assert [2, 2, 4] == task.map([1, 1, 2]).apply().get()
        assert [2, 2] == task.starmap([(1,), (1,)]).apply().get()
        assert [[2, 2], [4]] == task.chunks([(1,), (1,), (2,)], 2).group().apply().get()


def test_eager_run_is_not_locked_unless_asked_for(make_app: MakeApp) -> None:
    """An eager run takes no lock by default, and its lease is unprotected; with the setting it does."""
    seen = []

    def body() -> str:
        seen.append(current_task.lease.protected)
        return "ran"

    for eager, expected in ((None, "ran"), (False, "ran"), (True, None)):
        settings = {} if eager is None else {"singleton_lock_eager": eager}
        app = make_app(**settings)
        app.task(base=SingletonTask, name="x")(body)
        task = app.tasks["x"]
        with locked(task):
            assert expected == task.apply().get()
    assert [False, False] == seen


def test_eager_run_needs_no_store(make_app: MakeApp) -> None:
    """Without the eager setting an eager run asks for no store at all."""
    app = make_app(singleton_lock_url=None)

    @app.task(base=SingletonTask, name="x")
    def task() -> str:
        return "ran"

    assert "ran" == task.apply().get()
    assert "ran" == task()


def test_eager_policies(singleton: Singleton) -> None:
    """Eagerly a duplicate is skipped with the policy's result, or fails with DuplicateTask; waiting is not possible."""

    @singleton(name="skips", on_duplicate=Skip("there"))
    def skips() -> None: ...

    @singleton(name="raises", on_duplicate="raise")
    def raises() -> None: ...

    @singleton(name="waits", on_duplicate="retry")
    def waits() -> None: ...

    with locked(skips), locked(raises), locked(waits):
        assert "there" == skips.apply().get()
        for task in (raises, waits):
            result = task.apply()
            assert "FAILURE" == result.state
            assert isinstance(result.result, DuplicateTask)
            assert (task.lock_key_for(), "held-by-test") == (result.result.key, result.result.holder.task_id)


@pytest.fixture(params=["apply", "task_always_eager"])
def eagerly(request: pytest.FixtureRequest, app: Celery) -> Callable[[Any], Any]:
    """Runs work in this process, in either of Celery's two ways."""
    app.conf.task_always_eager = request.param == "task_always_eager"
    return lambda work: work.apply_async() if app.conf.task_always_eager else work.apply()


@pytest.fixture
def plain(app: Celery) -> Callable[..., Any]:
    """Makes signatures of a plain task, which goes by the given name; it returns that, or what it is given."""

    def body(value: Any = None) -> Any:
        return current_task.name if value is None else value

    return lambda name: app.task(name=name, shared=False)(body)


@pytest.fixture
def ended() -> Iterator[list[tuple[str, str]]]:
    """Names and states of the tasks that have ended."""
    seen: list[tuple[str, str]] = []

    def note(sender: Any, state: str, **_: Any) -> None:
        seen.append((sender.name, state))

    celery_signals.task_postrun.connect(note, weak=False)
    yield seen
    celery_signals.task_postrun.disconnect(note)


def test_eager_skip_at_the_end_of_a_chain(singleton: Singleton, plain: Any, eagerly: Any) -> None:
    """A duplicate that ends an eager chain gives it the policy's result."""

    @singleton(name="x", on_duplicate=Skip("there"))
    def task() -> None: ...

    with locked(task):
        assert "there" == eagerly(chain(plain("before").si(), task.si())).get()


def test_eager_skip_in_a_chain(singleton: Singleton, plain: Any, eagerly: Any, ended: Any) -> None:
    """An eager chain goes on after a skipped step, as the README says: Celery tells no step what follows it."""

    @singleton(name="x")
    def task() -> None: ...

    with locked(task):
        eagerly(chain(task.si(), plain("after").si()))
    assert [("x", "SUCCESS"), ("after", "SUCCESS")] == ended


def test_eager_skip_in_a_chord(singleton: Singleton, plain: Any, eagerly: Any, ended: Any) -> None:
    """A member of an eager chord counts as done with the policy's result, and its body runs."""

    @singleton(name="x", on_duplicate=Skip("there"))
    def task() -> None: ...

    with locked(task):
        work = chord([task.si(), plain("other").si()], plain("body").s())
        assert ["there", "other"] == eagerly(work).get()
    assert [("x", "SUCCESS"), ("other", "SUCCESS"), ("body", "SUCCESS")] == ended


@pytest.mark.parametrize("policy", ["skip", "retry", "raise"])
def test_eager_callback(singleton: Singleton, app: Celery, plain: Any, ended: Any, policy: str) -> None:
    """No callback runs after an eager duplicate."""
    app.conf.task_always_eager = True  # or callbacks would be published

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    with locked(task):
        task.apply_async(link=plain("callback").si())
    assert ["x"] == [name for name, _ in ended]


@pytest.mark.parametrize("policy", ["retry", "raise"])
def test_eager_failure_in_a_chain(singleton: Singleton, plain: Any, eagerly: Any, ended: Any, policy: str) -> None:
    """An eager chain ends with the duplicate that fails: Celery raises its error to whoever applies the chain."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    with locked(task), pytest.raises(DuplicateTask):
        eagerly(chain(plain("before").si(), task.si(), plain("after").si()))
    assert [("before", "SUCCESS"), ("x", "FAILURE")] == ended


@pytest.mark.parametrize("policy", ["retry", "raise"])
def test_eager_failure_at_the_end_of_a_chain(singleton: Singleton, plain: Any, eagerly: Any, policy: str) -> None:
    """A duplicate that fails at the end of an eager chain makes the chain's result a failure with its error."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    with locked(task):
        result = eagerly(chain(plain("before").si(), task.si()))
    assert "FAILURE" == result.state
    assert isinstance(result.result, DuplicateTask)


@pytest.mark.parametrize("policy", ["retry", "raise"])
def test_eager_failure_in_a_chord(singleton: Singleton, plain: Any, eagerly: Any, ended: Any, policy: str) -> None:
    """An eager chord's body does not run after a duplicate that fails: Celery raises its error once all members have run."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    with locked(task), pytest.raises(DuplicateTask):
        eagerly(chord([task.si(), plain("other").si()], plain("body").s()))
    assert [("x", "FAILURE"), ("other", "SUCCESS")] == ended


@pytest.mark.parametrize("source", ["option", "setting"])
def test_singleton_false_is_a_plain_task(make_app: MakeApp, source: str) -> None:
    """``singleton=False``, as option or app setting, makes a plain task, whose runs overlap without a lock."""
    setting = {"singleton_singleton": False} if source == "setting" else {}
    app = make_app(singleton_lock_eager=True, **setting)
    option = {"singleton": False} if source == "option" else {}

    @app.task(base=SingletonTask, name="x", bind=True, **option)
    def task(self: Any) -> list[bool]:
        return [self.lease.protected, *(deliver(self).retval if self.request.is_eager else [])]

    assert [False, False] == task.apply().get()


def test_app_task_cls(make_app: MakeApp) -> None:
    """With ``Celery(task_cls=SingletonTask)`` every task is a singleton but Celery's own, which stay plain."""
    app = Celery("unit", task_cls=SingletonTask, set_as_current=False, broker="memory://")
    app.conf.update(singleton_lock_url="memory://", singleton_lock_eager=True)

    @app.task(name="x")
    def task() -> str:
        return "ran"

    app.finalize()
    celerys = [one for name, one in app.tasks.items() if name.startswith("celery.")]
    assert celerys
    for one in celerys:
        assert type(one).__call__ is Task.__call__, one.name
    with locked(app.tasks["x"]):
        assert task.apply().get() is None


def test_app_task_cls_by_name() -> None:
    """``task_cls`` may be given as a text."""
    app = Celery("unit", task_cls="celery_singleton_lock:SingletonTask", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"

    @app.task(name="x")
    def task() -> None: ...

    assert task.lock_key_for()


def test_shared_task(make_app: MakeApp) -> None:
    """A shared task is a singleton in each app, with that app's settings."""

    @shared_task(base=SingletonTask, name="shared.x")
    def task() -> str:
        return "ran"

    one, other = make_app(singleton_lock_prefix="one"), make_app(singleton_lock_prefix="other")
    assert one.tasks["shared.x"].lock_key_for().startswith("one:")
    assert other.tasks["shared.x"].lock_key_for().startswith("other:")
    for app in (one, other):
        app.conf.singleton_lock_eager = True
    with locked(one.tasks["shared.x"]):
        assert one.tasks["shared.x"].apply().get() is None
        assert "ran" == other.tasks["shared.x"].apply().get()
    one.set_current()
    assert task.lock_key_for() == one.tasks["shared.x"].lock_key_for()


# -- users' own classes ------------------------------------------------------------------------


def traced(task: Any, **kwargs: Any) -> Any:
    return deliver(task, **kwargs).retval


class Plain(SingletonTask):
    name = "cls"

    def run(self) -> Any:
        return self.lease.held


class OwnCall(Plain):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["own", self.lease.held, self.run(*args, **kwargs)]


class SuperCall(Plain):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["own", self.lease.held, super().__call__(*args, **kwargs)]


class OwnBeforeStart(Plain):
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.started = (task_id, self.lease.held)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("cls", "expected"), [(Plain, True), (OwnCall, ["own", True, True])])
def test_overridden_without_super(app: Celery, cls: type, expected: Any) -> None:
    """A class that overrides ``__call__`` or ``run`` without super is locked, what it puts around the body included."""
    task = app.register_task(cls())
    assert expected == traced(task)
    assert_free(task)
    with locked(task):
        deliver_ignored(task)


def deliver_ignored(task: Any) -> None:
    """Deliver a duplicate, which is skipped."""
    assert "IGNORED" == deliver(task, task_id="id-2").info.state


def worker_optimized() -> Callable[[], None]:
    """As in a worker: Celery replaces ``Task.__call__``; answers how to put the old one back."""
    from celery.app import trace

    trace.setup_worker_optimizations(celery._state._get_current_app())
    return trace.reset_worker_optimizations


@pytest.fixture
def optimized() -> Any:
    reset = worker_optimized()
    yield
    reset()


@pytest.mark.usefixtures("optimized")
def test_overridden_call_with_super_in_a_worker(app: Celery) -> None:
    """In a worker a ``__call__`` that calls super runs the body with its own request, and so with its lease."""
    task = app.register_task(SuperCall())
    assert ["own", True, True] == traced(task)


def test_subclass_of_a_bound_class(app: Celery) -> None:
    """A task class made from one that is registered already has its own request and lease in the body."""
    seen = []

    class First(SingletonTask):
        name = "first"

        def run(self) -> None:
            seen.append((self.request.id, self.lease.held, self.lease.key))

    first = app.register_task(First())

    class Second(First):
        name = "second"

    second = app.register_task(Second())
    deliver(first, task_id="a")
    deliver(second, task_id="b")
    assert [("a", True, first.lock_key_for()), ("b", True, second.lock_key_for())] == seen


@pytest.mark.usefixtures("optimized")
def test_subclass_of_a_bound_class_in_a_worker(app: Celery) -> None:
    """The same in a worker, where Celery has replaced ``Task.__call__``."""
    test_subclass_of_a_bound_class(app)


@pytest.mark.parametrize("calls", ["run", "super"])
@pytest.mark.parametrize("shape", ["subclass", "mixin"])
@pytest.mark.usefixtures("optimized")
def test_context_around_the_body(app: Celery, calls: str, shape: str) -> None:
    """What Flask's users put around every body, an application context, is entered under the lock, and not for a duplicate."""
    current: ContextVar[str] = ContextVar("current", default="no context")
    events: list[str] = []
    task: Any = None

    @contextmanager
    def app_context() -> Iterator[None]:
        token = current.set("of the app")
        events.append(f"entered while {'held' if task.lock_holder() else 'free'}")
        yield
        events.append(f"left while {'held' if task.lock_holder() else 'free'}")
        current.reset(token)

    class ContextTask(SingletonTask if shape == "subclass" else Task):  # type: ignore[misc]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with app_context():
                return self.run(*args, **kwargs) if calls == "run" else super().__call__(*args, **kwargs)

    both = ContextTask if shape == "subclass" else type("Both", (SingletonMixin, ContextTask), {"abstract": True})

    @app.task(base=both, name="x", bind=True)
    def body(self: Any) -> Any:
        return current.get(), self.lease.protected, self.lease.held

    task = app.tasks["x"]
    assert ("of the app", True, True) == traced(task)
    assert ["entered while held", "left while held"] == events
    assert_free(task)
    with locked(task):
        deliver_ignored(task)
    assert 2 == len(events)


def test_before_start_without_super(app: Celery) -> None:
    """An overridden ``before_start`` runs once, under the lock, and not for a duplicate."""
    task = app.register_task(OwnBeforeStart())
    assert traced(task) is True
    assert ("id-1", True) == task.started
    del task.started
    with locked(task):
        deliver_ignored(task)
    assert not hasattr(task, "started")


def test_before_start_calls(app: Celery) -> None:
    """It is called once with what Celery passes: task id, arguments, keyword arguments."""
    calls = []

    class Counted(Plain):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            calls.append((task_id, tuple(args), kwargs))

        def run(self, *args: Any) -> None: ...

    task = app.register_task(Counted())
    deliver(task, 1, 2)
    task.apply((3,), task_id="eager")
    assert [("id-1", (1, 2), {}), ("eager", (3,), {})] == calls


def test_before_start_error_is_the_tasks_own(app: Celery) -> None:
    """An error in ``before_start`` fails the task as without us, and frees the lock."""

    class Failing(Plain):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise ZeroDivisionError

    task = app.register_task(Failing())
    assert "FAILURE" == deliver(task).info.state
    assert_free(task)


def test_abortable_task(make_app: MakeApp) -> None:
    """The mixin goes with AbortableTask: its methods work, and it is locked."""
    app = make_app(singleton_lock_eager=True)

    class Base(SingletonMixin, AbortableTask):
        abstract = True

    @app.task(base=Base, name="x", bind=True)
    def task(self: Any) -> Any:
        return [self.is_aborted(), self.lease.held]

    assert [False, True] == traced(app.tasks["x"])
    assert "AbortableAsyncResult" == type(task.AsyncResult("1")).__name__
    with locked(app.tasks["x"]):
        assert task.apply().get() is None


def test_django_task(make_app: MakeApp) -> None:
    """The mixin goes with Celery's task class for Django, ``delay_on_commit`` included."""
    pytest.importorskip("django")
    pytest.importorskip("celery.contrib.django.task")
    from celery.contrib.django.task import DjangoTask

    class Base(SingletonMixin, DjangoTask):
        abstract = True

    app = make_app(singleton_lock_eager=True)

    @app.task(base=Base, name="x", bind=True)
    def task(self: Any) -> Any:
        return self.lease.held

    assert hasattr(task, "delay_on_commit")
    assert traced(app.tasks["x"]) is True


def test_mixin_after_the_other_class() -> None:
    """Put the other way round, ``Base(Task, SingletonMixin)`` is refused, and never silently plain."""

    with pytest.raises(ConfigurationError, match=r"Base: SingletonMixin must come before"):

        class Base(Task, SingletonMixin):  # type: ignore[misc]
            abstract = True


def test_mixin_alone(app: Celery) -> None:
    """The mixin without a task class is refused with a clear message, as a base and in a class; sub-mixins are allowed."""
    for make in (
        lambda: app.task(base=SingletonMixin, name="x", shared=False, lazy=False)(run_nothing),
        lambda: app.register_task(type("Sync", (SingletonMixin,), {"name": "y", "run": run_nothing})()),
    ):
        with pytest.raises(ConfigurationError, match=r"task [xy]: SingletonMixin .*base=SingletonTask"):
            make().delay()

    class Short(SingletonMixin):
        lock_ttl = 5

        def run(self) -> float: ...

    class Sync(Short, Task):  # type: ignore[misc]
        name = "z"

    assert traced(app.register_task(Sync())) is None


def run_nothing() -> None: ...


# -- Celery's own features ---------------------------------------------------------------------


@pytest.mark.parametrize("extended", [False, True])
def test_arguments_in_results(singleton: Callable[..., Any], app: Celery, extended: bool) -> None:
    """A skip's result holds the arguments where that of every task does, with ``result_extended``, as the README says."""
    app.conf.result_extended = extended

    @singleton(name="x")
    def task(secret: str) -> None: ...

    @app.task(name="plain", shared=False)
    def plain(secret: str) -> None: ...

    redacted = {"argsrepr": "<redacted>", "kwargsrepr": "<redacted>", "ignore_result": False}
    skipped, ran = str(uuid4()), str(uuid4())  # Celery's memory backend is one for the whole process
    with locked(task, "s3cret"):
        deliver(task, "s3cret", task_id=skipped, **redacted)
    deliver(plain, "s3cret", task_id=ran, **redacted)
    metas = [str(app.backend.get_task_meta(task_id)) for task_id in (skipped, ran)]
    assert ["SUCCESS" in meta for meta in metas] == [True, True]
    assert ["s3cret" in meta for meta in metas] == [extended, extended]


def test_duplicate_is_in_throws(singleton: Singleton) -> None:
    """DuplicateTask is one of the task's expected errors, next to the user's own: no traceback is logged for it."""

    @singleton(name="x", throws=(KeyError,))
    def task() -> None: ...

    assert set(task.throws) == {KeyError, DuplicateTask, TooManyStarts}
    assert SingletonTask.throws == Task.throws


@pytest.mark.parametrize("throws", [KeyError, [KeyError], (KeyError,), ()])
def test_throws_however_it_is_written(singleton: Singleton, throws: Any) -> None:
    """However users write ``throws``, it goes on working."""

    @singleton(name="x", throws=throws)
    def task() -> None:
        raise KeyError("mine")

    expected = {DuplicateTask, TooManyStarts} | ({KeyError} if throws else set())
    assert expected == set(task.throws)


def test_throws_does_not_grow(app: Celery) -> None:
    """Bound twice, a task has DuplicateTask in its ``throws`` once."""
    task = app.register_task(Plain())
    task.bind(app)
    assert 1 == list(task.throws).count(DuplicateTask)


def test_autoretry_runs_under_the_lock(singleton: Singleton) -> None:
    """With autoretry_for the body is locked, its own error is retried, and the lock is free meanwhile."""
    runs = []

    @singleton(
        name="x", autoretry_for=(ValueError,), max_retries=2, retry_backoff=False, default_retry_delay=0, bind=True
    )
    def task(self: Any, a: int) -> int:
        runs.append(self.lease.held)
        if len(runs) < 3:
            raise ValueError
        return a

    assert 5 == task.apply((5,)).get()
    assert [True, True, True] == runs
    assert_free(task, 5)


def test_our_errors_are_never_auto_retried(singleton: Singleton) -> None:
    """``autoretry_for=(Exception,)`` does not take a refused duplicate for an error of the body."""

    @singleton(name="x", autoretry_for=(Exception,), max_retries=3, default_retry_delay=0, on_duplicate="raise")
    def task() -> None:
        raise AssertionError("must not run")

    with locked(task):
        assert isinstance(task.apply().result, DuplicateTask)


def test_lock_lost_of_the_body_is_auto_retried(singleton: Singleton) -> None:
    """LockLost raised in the body is the body's own error."""
    runs = []

    @singleton(name="x", autoretry_for=(LockLost,), max_retries=1, default_retry_delay=0, bind=True)
    def task(self: Any) -> str:
        runs.append(1)
        if len(runs) == 1:
            raise LockLost(self.lease.key)
        return "ran"

    assert "ran" == task.apply().get()


def test_own_retry_frees_the_lock(singleton: Singleton) -> None:
    """During the countdown of the task's own retry its lock is free."""

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        raise Retry("later")

    assert "RETRY" == deliver(task).info.state
    assert_free(task)


def functions_in(traceback: str) -> list[str]:
    return re.findall(r"^  File .*, in (\w+)$", traceback, re.MULTILINE)


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_refusal_leaves_the_tracer_few_frames(singleton: Singleton, policy: str) -> None:
    """What tells the tracer of a refusal has none of our inner frames, each of which costs the tracer more than a run."""

    @singleton(name="x", on_duplicate=policy)
    def task() -> None: ...

    with locked(task):
        assert ["trace_task", "wrapper"] == functions_in(deliver(task).retval.traceback)


@pytest.mark.parametrize("error", [Ignore("x"), Reject("x"), Retry("x")])
def test_what_the_body_tells_the_tracer_keeps_its_traceback(singleton: Singleton, error: Exception) -> None:
    """An Ignore, Reject or Retry of the body shows where it was raised."""

    @singleton(name="x")
    def task() -> None:
        raise error

    assert "task" == functions_in(deliver(task).retval.traceback)[-1]


@pytest.mark.parametrize("error", [ValueError("x"), Ignore(), SystemExit(1), KeyboardInterrupt(), LockLost("k")])
def test_lock_is_free_however_the_body_ends(singleton: Singleton, error: BaseException) -> None:
    """Whatever ends the body ends the lease."""

    @singleton(name="x")
    def task() -> None:
        raise error

    with suppress(SystemExit, KeyboardInterrupt):
        deliver(task)
    assert_free(task)


def test_lock_is_free_before_the_result_is_stored(app: Celery) -> None:
    """The lock is free when the result is stored, so a caller that reads the result can start the next run."""
    seen = []

    @app.task(base=SingletonTask, name="x")
    def task() -> str:
        return "ran"

    one = app.tasks["x"]

    class Backend:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def mark_as_done(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(one.lock_holder())

    one.backend = Backend(one.backend)
    deliver(one)
    assert [None] == seen


def test_eager_chain(singleton: Singleton) -> None:
    """Eagerly the rest of a chain runs after a granted body."""

    @singleton(name="first")
    def first() -> str:
        return "a"

    @singleton(name="second")
    def second(value: str) -> str:
        return value + "b"

    assert "ab" == chain(first.s(), second.s()).apply().get()


def test_signals_and_their_arguments(singleton: Singleton) -> None:
    """lock_acquired and lock_released come once each with the task as sender and its lease."""
    seen: list[Any] = []

    def acquired(sender: Any, lease: Any, **_: Any) -> None:
        seen.append(("acquired", sender.name, lease.held))

    def released(sender: Any, lease: Any, **_: Any) -> None:
        seen.append(("released", sender.name, lease.held))

    @singleton(name="x")
    def task() -> None:
        seen.append("body")

    signals.lock_acquired.connect(acquired, weak=False)
    signals.lock_released.connect(released, weak=False)
    try:
        deliver(task)
    finally:
        signals.lock_acquired.disconnect(acquired)
        signals.lock_released.disconnect(released)
    assert [("acquired", "x", True), "body", ("released", "x", False)] == seen


def test_failing_receiver_hurts_no_lock(singleton: Singleton) -> None:
    """A receiver that fails neither stops the body nor keeps the lock."""

    def broken(**_: Any) -> None:
        raise RuntimeError("receiver")

    @singleton(name="x", bind=True)
    def task(self: Any) -> bool:
        return self.lease.held

    signals.lock_acquired.connect(broken, weak=False)
    signals.lock_released.connect(broken, weak=False)
    try:
        assert deliver(task).retval is True
    finally:
        signals.lock_acquired.disconnect(broken)
        signals.lock_released.disconnect(broken)
    assert_free(task)


def test_duplicate_signal_is_sent_once(singleton: Singleton) -> None:
    """One decision, one signal, with key, task id, holder and the policy that decides."""
    seen: list[dict[str, Any]] = []

    def met(sender: Any, **named: Any) -> None:
        named.pop("signal")
        seen.append({"sender": sender.name, **named})

    @singleton(name="x", on_duplicate=Skip("there"))
    def task(a: int) -> None: ...

    signals.duplicate.connect(met, weak=False)
    try:
        with locked(task, 1):
            task.apply((1,), task_id="dup")
    finally:
        signals.duplicate.disconnect(met)
    assert 1 == len(seen)
    assert ("x", task.lock_key_for(1), "dup", Skip("there")) == tuple(
        seen[0][n] for n in ("sender", "key", "task_id", "policy")
    )
    assert isinstance(seen[0]["holder"], Holder)
    assert "held-by-test" == seen[0]["holder"].task_id


def test_callable_policy(singleton: Singleton) -> None:
    """A callable gets task and holder and answers a policy, by object or by name."""
    seen: list[Any] = []

    def choose(task: Any, holder: Any) -> Any:
        seen.append((task.name, holder.task_id))
        return Skip("chosen") if task.name == "one" else "raise"

    @singleton(name="one", on_duplicate=choose)
    def one() -> None: ...

    @singleton(name="two", on_duplicate=choose)
    def two() -> None: ...

    with locked(one), locked(two):
        assert "chosen" == one.apply().get()
        assert isinstance(two.apply().result, DuplicateTask)
    assert [("one", "held-by-test"), ("two", "held-by-test")] == seen


@pytest.mark.parametrize("answer", [None, "never", 5])
def test_callable_policy_with_a_bad_answer(singleton: Singleton, answer: Any) -> None:
    """An answer that is no policy fails the duplicate with a ConfigurationError that names task and value."""

    @singleton(name="x", on_duplicate=lambda task, holder: answer)
    def task() -> None: ...

    with locked(task):
        error = task.apply().result
    assert isinstance(error, ConfigurationError)
    assert "x" in str(error)
    assert repr(answer) in str(error)


def test_callable_policy_as_method(app: Celery) -> None:
    """In a class a callable option may be a static method."""

    class Own(SingletonTask):
        name = "x"

        @staticmethod
        def on_duplicate(task: Any, holder: Any) -> Any:
            return Skip("static")

        def run(self) -> None: ...

    task = app.register_task(Own())
    with locked(task):
        assert "static" == task.apply().get()


def test_force_unlock(singleton: Singleton) -> None:
    """An operator takes a lock from its holder, learns who that was, and the lock is free."""

    @singleton(name="x")
    def task(a: int) -> None: ...

    with locked(task, 1):
        assert "held-by-test" == task.force_unlock(1).task_id
        assert_free(task, 1)
        assert task.force_unlock(1) is None


def test_lock_holder(singleton: Singleton) -> None:
    """Who holds a lock can be asked without queueing."""

    @singleton(name="x")
    def task(a: int) -> None: ...

    assert task.lock_holder(1) is None
    with locked(task, 1):
        assert "held-by-test" == assert_held(task, a=1).task_id


def test_token_is_no_task_id_and_never_shown(singleton: Singleton) -> None:
    """The secret of a lease is made anew for each delivery, and is in no repr."""
    tokens = []

    @singleton(name="x", bind=True)
    def task(self: Any) -> None:
        tokens.append(self.lease._state.spec.token)
        assert tokens[-1] not in repr(self.lease)
        assert tokens[-1] not in repr(self.lease._state.spec)
        assert tokens[-1] not in repr(self.request)

    assert deliver(task).info is None
    assert deliver(task).info is None
    assert 2 == len(set(tokens))
    assert "id-1" not in tokens


@pytest.mark.parametrize("lock_from", ["start", "publish"])
def test_eager_calls_have_no_duplicate(make_app: MakeApp, lock_from: str) -> None:
    """The result of a call has `duplicate` in eager mode, too: users' tests run the code that asks for it."""
    app = make_app(singleton_lock_url="memory://", task_always_eager=True)

    @app.task(base=SingletonTask, name="x", lock_from=lock_from)
    def task() -> str:
        return "ran"

    result = task.delay()
    assert ("ran", None) == (result.get(), result.duplicate)
