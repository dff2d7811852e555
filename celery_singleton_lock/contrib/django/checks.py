"""System checks: `manage.py check` reports what would keep a worker from starting, or locks from being kept.

The app is Celery's current one, as the project's `__init__` module makes it. Its task modules are imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from celery import current_app
from django.core.checks import CheckMessage, Error, Warning

from celery_singleton_lock.config.exclusions import different_limits
from celery_singleton_lock.config.problems import Problems
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.context import open_store
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.worker.checks import options_of_tasks, problem_of

#: Before Celery (5.7) imports task modules in a Django project, it runs all checks.
_is_running = ContextVar("celery_singleton_lock_check", default=False)


def check_options(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Check the app's settings, and the options of all its singleton tasks.

    E001: the settings. E002: the options of a task. E003: the options of tasks that share a lock.
    """
    if _is_running.get():
        return []
    token = _is_running.set(True)
    try:
        return list(_wrong_options(current_app._get_current_object()))
    finally:
        _is_running.reset(token)


def _wrong_options(app: Any) -> Iterator[CheckMessage]:
    try:
        app.loader.import_default_modules()
    except ConfigurationError as error:  # of a class that is no task: it is refused where it is made
        yield from _errors("E002", error.problems)
        return
    problems = Problems()
    with problems:
        settings_of(app.conf)
    of_settings = problems.found
    options = options_of_tasks(app, problems)
    yield from _errors("E001", of_settings)
    yield from _errors("E002", problems.found[len(of_settings) :])
    yield from _errors("E003", different_limits(options))


def check_store(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Ask the store whether it may drop locks (`manage.py check --deploy`).

    W001: it may. W002: nobody knows.
    """
    try:
        store = open_store(settings_of(current_app.conf), limit=None)
    except ConfigurationError:  # E001
        return []
    try:
        problem = problem_of(store.eviction_policy())
    except StoreError as error:
        return [_warning("W002", f"The store of locks does not show its maxmemory-policy: {error}")]
    finally:
        store.close()
    return [_warning("W001", problem)] if problem else []


def _errors(number: str, problems: Iterable[str]) -> Iterator[CheckMessage]:
    return (Error(problem, id=f"celery_singleton_lock.{number}") for problem in problems)


def _warning(number: str, text: str) -> CheckMessage:
    return Warning(text, id=f"celery_singleton_lock.{number}", hint="Set maxmemory-policy noeviction.")
