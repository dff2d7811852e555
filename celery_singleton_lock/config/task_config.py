"""The configuration of one task: its checked options, and how its keys are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from celery_singleton_lock.config.call_options import LOCK_OPTIONS_HEADER, as_header, call_options
from celery_singleton_lock.config.exclusions import excluded_pairs
from celery_singleton_lock.config.foreign import unknown_options
from celery_singleton_lock.config.options import TASK_OPTIONS, Options, is_limit, spelling
from celery_singleton_lock.config.problems import Problems
from celery_singleton_lock.config.settings import settings_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.keys.arguments import Parameters
from celery_singleton_lock.keys.builder import ArgumentFunction, KeyBuilder
from celery_singleton_lock.keys.canonical import digest, escaped
from celery_singleton_lock.policies import NAMED
from celery_singleton_lock.store.keys import starts_key

_ATTRIBUTE = "_singleton_config"
#: Attribute of a task class: what is wrong with its options.
_PROBLEMS = "_singleton_problems"
_SAME_WORK = ("unique_on", "lock_key")
#: The default policy in a group, where a duplicate is other work and must not be skipped.
_GROUP_POLICY = NAMED["wait"]


class TaskConfig(NamedTuple):
    """Worked out once for each task. All keys of the task, or of its group, start with `base`."""

    options: Options
    keys: KeyBuilder
    base: str
    check_call: Callable[..., object] | None
    #: Returns how many calls with a call's lock key may run at once; 0: one, without slots (see `LeaseSpec.limit`).
    limit: Callable[[Sequence[Any], Mapping[str, Any]], int]

    def digest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the digest of a call's lock key, or raise the `TypeError` that Celery raises for the call."""
        try:
            form = self.keys.canonical_call(args, kwargs)
        except TypeError:
            if self.check_call is not None:
                self.check_call(*args, **kwargs)
            raise
        return digest(form)

    def starts_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the key of the starts with a call's lock key that count for `max_starts`, "" if none do."""
        return starts_key(self.base, self.digest(args, kwargs)) if self.options.max_starts is not None else ""

    def lock_keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the keys of a call's lock and of its set of slots, "" if it has none."""
        digest = self.digest(args, kwargs)
        return f"{self.base}:lock:{digest}", f"{self.base}:slots:{digest}" if self.options.is_limited else ""


def config_for(task: Any) -> TaskConfig:
    """Return the configuration of a task. It is made when first needed, as apps may be configured after their tasks.

    Raises:
        ConfigurationError: the task's options, or settings of its app, cannot be used.
    """
    config: TaskConfig | None = task.__dict__.get(_ATTRIBUTE)
    if config is None:
        refuse_wrong(task)
        conf = task.app.conf
        settings = settings_of(conf)
        options, keys, limit = _configured(task.__class__, task.name, conf)  # the task may be a proxy
        base = f"{settings.prefix}:{{{escaped(options.lock_group or task.name)}}}"
        config = task.__dict__[_ATTRIBUTE] = TaskConfig(options, keys, base, getattr(task, "__header__", None), limit)
    return config


def config_of_call(task: Any, lock_options: Any) -> TaskConfig:
    """Return the configuration of a call whose message carries these options; None: it carries none.

    Raises:
        ConfigurationError: they cannot be used here.
    """
    config = config_for(task)
    if lock_options is None:
        return config
    given = call_options(task.name, lock_options)
    options, keys, _ = _configured(task.__class__, task.name, task.app.conf, given)
    return config._replace(options=options, keys=keys)


def headers_with(task: Any, headers: Mapping[str, Any] | None, lock_options: Any) -> dict[str, Any]:
    """Return the headers of a call with its options added, which replace those of the same name there.

    It needs no store, as a publisher may have none.

    Raises:
        ConfigurationError: the options cannot be used, alone or together with the task's.
    """
    headers = headers or {}
    earlier = call_options(task.name, headers.get(LOCK_OPTIONS_HEADER) or {})
    given = {**earlier, **call_options(task.name, lock_options)}
    _configured(task.__class__, task.name, task.app.conf, given)
    return {**headers, LOCK_OPTIONS_HEADER: as_header(given)}


def forget_configs(app: Any) -> None:
    """Have the configurations of an app's tasks made anew, from settings that have changed."""
    for task in list(app.tasks.values()):
        task.__dict__.pop(_ATTRIBUTE, None)


def note_problems(cls: Any, name: str, problem: str = "") -> None:
    """Note on a task class what is wrong with its options, without the settings of its app, and another problem, if any.

    An error here would end `Celery.finalize`, and leave the app without the tasks that come after this one. So each use of
    the task is refused instead, and the start of a worker that has it.
    """
    if _PROBLEMS in vars(cls):
        return
    problems = Problems()
    problems.add([problem] if problem else [])
    for base in reversed(cls.__mro__):
        problems.add(unknown_options(name, vars(base)))
    with problems:
        _configured(cls, name)
    setattr(cls, _PROBLEMS, problems.found)


def note_problem(cls: Any, problem: str) -> None:
    """Note that a task class cannot be used at all."""
    setattr(cls, _PROBLEMS, (problem,))


def refuse_wrong(task: Any) -> None:
    """Refuse the use of a task whose class has wrong options.

    Raises:
        ConfigurationError: naming task, options and values.
    """
    if problems := getattr(task, _PROBLEMS, ()):
        raise ConfigurationError(*problems)


def has_problems(task: Any) -> bool:
    """Tell whether a task, or its class, was found to have wrong options when it was bound."""
    return bool(getattr(task, _PROBLEMS, ()))


def _configured(
    cls: Any, name: str, conf: Any = None, call: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Options, KeyBuilder, Any]:
    """Choose each option (the call's, else the task's, else the app's setting, else the default); make keys and limit."""
    problems = Problems()
    own = {option: getattr(cls, option) for option in TASK_OPTIONS}
    if "lock_key" in call:
        own["unique_on"] = None
    own.update(call)
    # A task or a call that says itself which calls are the same work replaces both settings.
    replaced = _SAME_WORK if any(own[option] is not None for option in _SAME_WORK) else ()
    found = {}
    for option, row in TASK_OPTIONS.items():
        value, source = own[option], f"task {name}: {'lock_options ' if option in call else ''}{option}"
        if conf is not None and value is None and option not in replaced:
            setting = f"singleton_{option}"
            value, source = conf.get(setting), f"setting {spelling(conf, setting)} (task {name})"
        with problems:
            found[option] = row.checked(value, source)
    problems.refuse()  # pairs are looked at when each option is right
    if found["lock_group"] is not None and own["on_duplicate"] is None:
        found["on_duplicate"] = _GROUP_POLICY
    options = Options(**found)
    problems.add(excluded_pairs(name, options))
    parameters = _parameters(cls)
    with problems:
        keys = _keys(f"task {name}: {'lock_options ' if 'lock_key' in call else ''}", options, parameters)
    with problems:
        limit = _limit(name, options.lock_limit, parameters)
    problems.refuse()
    return options, keys, limit


def _keys(source: str, options: Options, parameters: Parameters) -> KeyBuilder:
    try:
        return KeyBuilder(parameters, options.unique_on, options.lock_key, options.lock_group)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}{error}") from error


def _limit(task: str, limit: int | Callable[..., int], parameters: Parameters) -> Callable[..., int]:
    if not callable(limit):
        number = 0 if limit == 1 else limit
        return lambda args, kwargs: number
    try:
        function = ArgumentFunction("lock_limit", limit, parameters)
    except ConfigurationError as error:
        raise ConfigurationError(f"task {task}: {error}") from error

    def checked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        answer = function.result(parameters.call(args, kwargs))
        if not is_limit(answer):
            raise ConfigurationError(f"task {task}: lock_limit returned {answer!r}, which is no whole number from 1")
        return int(answer)

    return checked


def _parameters(cls: Any) -> Parameters:
    run = inspect.getattr_static(cls, "run")
    run = run.__get__(object(), cls) if hasattr(run, "__get__") else run  # a method without its ``self``
    # Celery does not look behind `functools.wraps` when it checks a call (`celery.utils.functional.head_from_fun`).
    decorator = inspect.signature(run, follow_wrapped=False) if hasattr(run, "__wrapped__") else None
    return Parameters(inspect.signature(run), decorator)
