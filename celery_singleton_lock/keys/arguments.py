"""The arguments of a call by name, as the parameters of a task and of its decorator give them.

A decorator with `functools.wraps` has two signatures: its own, which Celery checks calls against, and that of the
function behind it. Where a call fits both, and they agree on names, the function's names count. Otherwise the decorator
adds, removes or reorders arguments, and only what is passed by name is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from inspect import Parameter
from typing import Any

from celery_singleton_lock.errors import LockKeyError

#: What ``*args`` and ``**kwargs`` are when nothing is left for them.
_REST: Mapping[Any, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}


class Call:
    """The arguments of one call, defaults filled in.

    Attributes:
        by_parameter: ``*args`` and ``**kwargs`` included.
        is_changed: whether a decorator changes the arguments on their way to the function.
    """

    def __init__(self, parameters: Parameters, bound: inspect.BoundArguments, is_changed: bool) -> None:
        self.by_parameter: Mapping[str, Any] = {**parameters.defaults, **bound.arguments}
        self.is_changed = is_changed
        self._parameters, self._bound = parameters, bound

    @cached_property
    def _found(self) -> tuple[dict[str, Any], Sequence[Any]]:
        return _by_name(self._bound)

    @property
    def unnamed(self) -> Sequence[Any]:
        """The content of ``*args``."""
        return self._found[1]

    @property
    def hidden(self) -> Collection[str]:
        """Names of the parameters that an unnamed argument of a changed call may belong to."""
        if not (self.is_changed and self.unnamed):
            return ()
        return [
            name for name in self._parameters.single if name not in self._found[0] and name not in self._parameters.own
        ]

    @property
    def named(self) -> Mapping[str, Any]:
        """Arguments by name, the content of ``**kwargs`` included."""
        known, hidden = {**self._parameters.defaults, **self._found[0]}, self.hidden
        order = [name for name in self._parameters.single if name in known and name not in hidden]
        return {name: known[name] for name in (*order, *sorted(self._found[0]))}

    def argument(self, name: str) -> Any:
        """Return the argument of one parameter."""
        arguments = self.named if self.is_changed else self.by_parameter
        if name not in arguments:
            raise LockKeyError(
                f"parameter {name!r}: a decorator of the task hides which argument it is; "
                "pass it by keyword, or make the key with a callable lock_key"
            )
        return arguments[name]


class Parameters:
    """The parameters of a function, and of a decorator around it.

    Attributes:
        names: of all parameters.
        single: names of the parameters that take one argument each, in order.
        own: of these, what the decorator has, or the function where there is none.
        defaults: by name, what a parameter gets that is not passed.
        args_name, kwargs_name: names of ``*args`` and ``**kwargs``, "" where there is none.
    """

    def __init__(self, function: inspect.Signature, decorator: inspect.Signature | None = None) -> None:
        self._function, self._shown = function, decorator or function
        self.own = _single(self._shown)
        parameters = {**function.parameters, **self.own}
        kinds = {p.kind: p.name for p in (*self._shown.parameters.values(), *parameters.values())}
        self.names = parameters.keys()
        self.single = list({**_single(function), **self.own})
        self.args_name = kinds.get(Parameter.VAR_POSITIONAL, "")
        self.kwargs_name = kinds.get(Parameter.VAR_KEYWORD, "")
        defaults = {name: _REST.get(p.kind, p.default) for name, p in parameters.items()}
        self.defaults = {name: value for name, value in defaults.items() if value is not Parameter.empty}

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Give the arguments of a call their names, or raise the `TypeError` of a call that does not fit."""
        shown = self._shown.bind(*args, **kwargs)
        bound = shown if self._function is self._shown else self._passed_on(shown, args, kwargs)
        return Call(self, bound or shown, is_changed=bound is None)

    def _passed_on(
        self, shown: inspect.BoundArguments, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments | None:
        """Bind the call to the function; None where the decorator must change some of its arguments."""
        try:
            passed_on = self._function.bind(*args, **kwargs)
        except TypeError:
            return None
        both = shown.arguments.keys() & self.own.keys()
        agree = all(passed_on.arguments.get(name, Call) is shown.arguments[name] for name in both)
        return passed_on if agree else None


def _single(signature: inspect.Signature) -> dict[str, Parameter]:
    return {name: p for name, p in signature.parameters.items() if p.kind not in _REST}


def _by_name(bound: inspect.BoundArguments) -> tuple[dict[str, Any], Sequence[Any]]:
    """Return the arguments that have a name, and those that have none."""
    named: dict[str, Any] = {}
    unnamed: Sequence[Any] = ()
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is Parameter.VAR_POSITIONAL:
            unnamed = value
        elif kind is Parameter.VAR_KEYWORD:
            named = {**value, **named}
        else:
            named[name] = value
    return named, unnamed
