"""What of a task's options can be worked out once: checked options, how keys are made, and what they start with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.config.options import (
    Options,
    checked,
    given_options,
    options_of,
    refuse_unknown,
    settings_of,
)
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.signature.keys import KeyBuilder, digest, escaped


@dataclass(frozen=True)
class TaskConfig:
    """The plan of one task."""

    options: Options
    keys: KeyBuilder
    base: str
    check_call: Callable[..., object] | None

    def digest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What tells a call from others of the task.

        Raises:
            TypeError: the call does not fit the task, as Celery says it.
            SignatureError: an argument has no stable form.
        """
        try:
            form = self.keys.form(args, kwargs)
        except TypeError:
            if self.check_call is not None:
                self.check_call(*args, **kwargs)
            raise
        return digest(form)


def config_for(task: Any) -> TaskConfig:
    """The plan of a task, made when it is first needed.

    Raises:
        ConfigurationError: an option or setting cannot be used.
    """
    found: TaskConfig | None = task.__dict__.get("_singleton_plan")
    if found is None:
        options = options_of(task.name, given_options(task.__class__), task.app.conf.get)
        keys = _keys(task.__class__, task.name, options.unique_on, options.lock_key)
        base = f"{settings_of(task.app.conf).prefix}:{{{escaped(task.name)}}}"
        found = task.__dict__["_singleton_plan"] = TaskConfig(options, keys, base, getattr(task, "__header__", None))
    return found


def forget_configs(app: Any) -> None:
    """Work out all plans anew when they are needed next, from settings that have changed."""
    for task in list(app.tasks.values()):
        task.__dict__.pop("_singleton_plan", None)


def check_class(cls: Any, name: str) -> None:
    """Refuse bad options of a task class when it is bound; those of the app are looked at when they are needed.

    Arguments:
        cls: the class.
        name: of the task.

    Raises:
        ConfigurationError: naming task, option and value.
    """
    for base in reversed(cls.__mro__):
        refuse_unknown(name, vars(base))
    given = given_options(cls)
    for option, value in given.items():
        if value is not None:
            checked(option, value, f"task {name}: {option}")
    _keys(cls, name, given["unique_on"], given["lock_key"])


def _keys(cls: Any, name: str, unique_on: Any, lock_key: Any) -> KeyBuilder:
    try:
        signature, shown = _signatures(cls)
        return KeyBuilder.of(signature, unique_on, lock_key, shown)
    except ConfigurationError as error:
        raise ConfigurationError(f"task {name}: {error}") from error


def _signatures(cls: Any) -> tuple[inspect.Signature, inspect.Signature | None]:
    """The parameters of `run` without ``self``, and of its decorator if that has used `functools.wraps`.

    Celery checks calls against the second, if there is one (`celery.utils.functional.head_from_fun`).
    """
    run = inspect.getattr_static(cls, "run")
    run = run.__get__(object(), cls) if hasattr(run, "__get__") else run
    shown = inspect.signature(run, follow_wrapped=False) if hasattr(run, "__wrapped__") else None
    return inspect.signature(run), shown
