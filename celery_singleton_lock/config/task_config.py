"""The configuration of one task: its checked options, and how its keys are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.config.foreign import refuse_unknown_options
from celery_singleton_lock.config.options import TASK_OPTIONS, Options
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.signature.arguments import Parameters
from celery_singleton_lock.signature.canonical import digest, escaped
from celery_singleton_lock.signature.keys import KeyBuilder

_ATTRIBUTE = "_singleton_config"
_SAME_WORK = ("unique_on", "lock_key")


@dataclass(frozen=True)
class TaskConfig:
    """Worked out once for each task. All keys of the task start with `base`."""

    options: Options
    keys: KeyBuilder
    base: str
    check_call: Callable[..., object] | None

    def digest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the digest of a call's signature, or raise the `TypeError` that Celery raises for the call."""
        try:
            form = self.keys.canonical_call(args, kwargs)
        except TypeError:
            if self.check_call is not None:
                self.check_call(*args, **kwargs)
            raise
        return digest(form)


def config_for(task: Any) -> TaskConfig:
    """Return the configuration of a task. It is made when first needed, as apps may be configured after their tasks."""
    config: TaskConfig | None = task.__dict__.get(_ATTRIBUTE)
    if config is None:
        conf = task.app.conf
        options, keys = _configured(task.__class__, task.name, conf.get)  # the task may be a proxy
        base = f"{settings_of(conf).prefix}:{{{escaped(task.name)}}}"
        config = task.__dict__[_ATTRIBUTE] = TaskConfig(options, keys, base, getattr(task, "__header__", None))
    return config


def forget_configs(app: Any) -> None:
    """Have the configurations of an app's tasks made anew, from settings that have changed."""
    for task in list(app.tasks.values()):
        task.__dict__.pop(_ATTRIBUTE, None)


def check_class(cls: Any, name: str) -> None:
    """Refuse bad options of a task class, without the settings of its app."""
    for base in reversed(cls.__mro__):
        refuse_unknown_options(name, vars(base))
    _configured(cls, name, setting=lambda _: None)


def _configured(cls: Any, name: str, setting: Callable[[str], Any]) -> tuple[Options, KeyBuilder]:
    """Choose each option (the task's own, else the app's setting, else the default) and make the keys from them."""
    # A task that says itself which calls are the same work replaces both settings.
    replaced = _SAME_WORK if any(getattr(cls, option) is not None for option in _SAME_WORK) else ()
    found = {}
    for option, row in TASK_OPTIONS.items():
        value, source = getattr(cls, option), f"task {name}: {option}"
        if value is None and option not in replaced:
            value, source = setting(f"singleton_{option}"), f"setting singleton_{option} (task {name})"
        found[option] = row.checked(value, source)
    options = Options(**found)
    try:
        _refuse_conflicts(options)
        return options, KeyBuilder(_parameters(cls), options.unique_on, options.lock_key)
    except ConfigurationError as error:
        raise ConfigurationError(f"task {name}: {error}") from error


def _refuse_conflicts(options: Options) -> None:
    least, most = options.lock_at_least, options.lock_at_most
    if most is not None and most <= least:
        raise ConfigurationError(
            f"lock_at_most={most!r} must be above lock_at_least={least!r}: a lost lease leaves no hold"
        )


def _parameters(cls: Any) -> Parameters:
    run = inspect.getattr_static(cls, "run")
    run = run.__get__(object(), cls) if hasattr(run, "__get__") else run  # a method without its ``self``
    # Celery does not look behind `functools.wraps` when it checks a call (`celery.utils.functional.head_from_fun`).
    decorator = inspect.signature(run, follow_wrapped=False) if hasattr(run, "__wrapped__") else None
    return Parameters(inspect.signature(run), decorator)
