"""Lock keys: which arguments of a call count, and the canonical form that they make."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from celery_singleton_lock.errors import ConfigurationError, LockKeyError
from celery_singleton_lock.keys.arguments import Call, Parameters
from celery_singleton_lock.keys.canonical import canonical, encoded

MAX_CALLABLE_KEY = 1024  # bytes


class KeyBuilder:
    """Makes canonical forms of a task's calls: of all arguments, of those in `unique_on`, or by `lock_key`.

    In a group, ``unique_on=["a", "b"]`` means the same as the template ``"{a}{b}"``, and defaults count.
    """

    def __init__(
        self,
        parameters: Parameters,
        unique_on: Collection[str] | None = None,
        lock_key: str | Callable[..., str] | None = None,
        lock_group: str | None = None,
    ) -> None:
        self._parameters = parameters
        self._unique_on = unique_on
        self._template = _parsed(lock_key) if isinstance(lock_key, str) else None
        self._function = ArgumentFunction("lock_key", lock_key, parameters) if callable(lock_key) else None
        needed = unique_on or [name for _, name in self._template or () if name is not None]
        for name in needed:
            if name not in parameters.names:
                option = f"lock_key={lock_key!r}" if unique_on is None else f"unique_on={unique_on!r}"
                raise ConfigurationError(f"{option}: {name!r} is no parameter of the task")
        self._tag = "group" if lock_group is not None else ""
        if self._tag and unique_on is not None:  # values without names, as tasks of one group may name them differently
            self._template = [("", name) for name in unique_on]
        self._encoded_defaults: dict[str, str] = {}
        for name, default in parameters.defaults.items():
            with suppress(LockKeyError):  # a default without a stable form equals no argument but itself
                self._encoded_defaults[name] = encoded(canonical(default, name))

    def canonical_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the canonical form of a call, or raise the `TypeError` of a call that does not fit."""
        call = self._parameters.call(args, kwargs)
        if self._function is not None:
            return [self._tag or "key", _checked(self._function.result(call))]
        if self._template is not None:
            return [self._tag or "template", *_filled(self._template, call)]
        if self._unique_on is not None:
            return ["call", self._counting({name: call.argument(name) for name in self._unique_on})]
        return ["decorated" if call.is_changed else "call", self._counting(call.by_parameter)]

    def _counting(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out arguments equal to their default, so that a new parameter with a default changes no old key."""
        defaults, forms = self._parameters.defaults, {}
        for name, value in arguments.items():
            if name in defaults and value is defaults[name]:
                continue
            form = canonical(value, name)
            if name not in defaults or encoded(form) != self._encoded_defaults.get(name):
                forms[name] = form
        return forms


class ArgumentFunction:
    """Calls the callable that a task has as an option, such as `lock_key`, with the task's arguments by name."""

    def __init__(self, name: str, function: Callable[..., Any], parameters: Parameters) -> None:
        option = f"{name}={function!r}"
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:  # of some builtins
            raise ConfigurationError(f"{option}: its parameters are unknown, put it in a function") from error
        self._name, self._function = name, function
        self._own = Parameters(self._signature)
        for name in self._own.single:
            if name in parameters.single or name in self._own.defaults:
                continue
            if name in ("self", "cls"):
                raise ConfigurationError(
                    f"{option}: it gets the task's arguments and no {name!r}, make it a staticmethod"
                )
            if not parameters.kwargs_name:
                raise ConfigurationError(f"{option}: it needs {name!r}, which is no parameter of the task")

    def result(self, call: Call) -> Any:
        """Return what the callable returns for a call, or refuse a call that does not name what the callable needs."""
        rest = dict(call.named)
        passed: dict[str, Any] = {}
        for name in self._own.single:
            if name in rest:
                passed[name] = rest.pop(name)
            elif name in call.hidden or name not in self._own.defaults:
                raise LockKeyError(f"parameter {name!r}: {self._name} needs it, and the call does not pass it by name")
        if self._own.kwargs_name:
            passed[self._own.kwargs_name], rest = rest, {}
        if self._own.args_name:
            passed[self._own.args_name] = (*rest.values(), *call.unnamed)
        bound = inspect.BoundArguments(self._signature, passed)
        bound.apply_defaults()
        return self._function(*bound.args, **bound.kwargs)


def _checked(key: Any) -> str:
    if not isinstance(key, str):
        raise LockKeyError(f"lock_key returned a value of type {type(key).__qualname__}, not a str")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_CALLABLE_KEY:
        raise LockKeyError(f"lock_key returned more than {MAX_CALLABLE_KEY} bytes")
    return key


def _filled(template: Sequence[tuple[str, str | None]], call: Call) -> list[Any]:
    """Return the texts of a template and, each in a list of its own, the forms of its fields."""
    parts: list[Any] = []
    for text, name in template:
        parts += [text] if name is None else [text, [canonical(call.argument(name), name)]]
    return parts


def _parsed(template: str) -> list[tuple[str, str | None]]:
    """Split a template into texts, each with the name of the field that follows it, or None."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"lock_key={template!r}: {error}") from error
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise ConfigurationError(f"lock_key={template!r}: a field must be a plain parameter name")
    return [(text, name) for text, name, _, _ in parts]
