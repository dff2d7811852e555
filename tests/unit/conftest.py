"""What unit tests share: apps without servers, a clock that a test moves, and cleaning up behind apps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.backends.cache import _DUMMY_CLIENT_CACHE
from hypothesis import HealthCheck, settings

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.config.task_config import config_for, refuse_wrong
from celery_singleton_lock.context import ProcessContext, context_of
from celery_singleton_lock.delivery.attempt import Attempt
from celery_singleton_lock.store.requests import LeaseSpec

MakeApp = Callable[..., Celery]

# The same examples in each run, however slow the machine is.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    """A clock of the test's own."""
    return Clock()


@pytest.fixture(autouse=True)
def _forget_apps() -> Iterator[None]:
    """Celery keeps tasks for apps yet to come, and the current app, for the whole process: put both back.

    Apps also share the results in memory.
    """
    finalizers, current = set(_state._on_app_finalizers), _state._tls.current_app
    _DUMMY_CLIENT_CACHE.clear()
    yield
    _state._on_app_finalizers.intersection_update(finalizers)
    _state._tls.current_app = current


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Makes Celery apps without a broker, whose locks live in memory unless a setting says otherwise."""
    made: list[Celery] = []

    def make(**settings: Any) -> Celery:
        app = Celery("unit", set_as_current=False, broker="memory://", backend="cache+memory://")
        app.conf.update({"singleton_lock_url": "memory://", **settings})
        made.append(app)
        return app

    yield make
    for app in made:
        for context in [one for one in vars(app).values() if isinstance(one, ProcessContext)]:
            context.end()  # no thread of it writes to the log of a later test
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    """An app whose locks live in memory and are taken in eager runs too."""
    return make_app(singleton_lock_eager=True)


def attempt_with(task: Any, request: Any, spec: LeaseSpec) -> Attempt:
    """Return a delivery that wants this lock, in this process."""
    attempt = Attempt(task, request)
    attempt.use(config_for(task))
    attempt.context, attempt.spec = context_of(task.app), spec
    attempt.store = attempt.context.store
    return attempt


@pytest.fixture
def singleton(app: Celery) -> Callable[..., Any]:
    """A decorator that makes singleton tasks of `app`; its arguments are task options."""

    def decorate(**options: Any) -> Callable[[Callable[..., Any]], Any]:
        def make(body: Callable[..., Any]) -> Any:
            task = app.task(**{"base": SingletonTask, **options})(body)
            app.finalize(auto=True)
            refuse_wrong(made := app.tasks[task.name])
            return made

        return make

    return decorate
