"""The arguments of a call by name, as the parameters of a task and of its decorator give them.

A decorator with `functools.wraps` has two signatures: its own, which Celery checks calls against, and that of the
function behind it. Where a call fits both, and they agree on names, the function's names count. Otherwise the decorator
adds, removes or reorders arguments, and only what is passed by name is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from celery_singleton_lock.errors import SignatureError

#: What ``*args`` and ``**kwargs`` are when nothing is left for them.
_REST: Mapping[Any, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}


@dataclass(frozen=True)
class Call:
    """The arguments of one call, defaults filled in."""

    by_parameter: Mapping[str, Any]  # ``*args`` and ``**kwargs`` included
    named: Mapping[str, Any]  # the content of ``**kwargs`` included
    unnamed: Sequence[Any]  # the content of ``*args``
    is_changed: bool  # by a decorator, on the way to the function
    hidden: Collection[str]  # names of the parameters that an unnamed argument may belong to

    def argument(self, name: str) -> Any:
        """Return the argument of one parameter."""
        arguments = self.named if self.is_changed else self.by_parameter
        if name not in arguments:
            raise SignatureError(
                f"parameter {name!r}: a decorator of the task hides which argument it is; "
                "pass it by keyword, or make the key with a callable lock_key"
            )
        return arguments[name]


class Parameters:
    """The parameters of a function, and of a decorator around it.

    Attributes:
        names: of all parameters.
        single: names of the parameters that take one argument each, in order.
        defaults: by name, what a parameter gets that is not passed.
        args_name, kwargs_name: names of ``*args`` and ``**kwargs``, "" where there is none.
    """

    def __init__(self, function: inspect.Signature, decorator: inspect.Signature | None = None) -> None:
        self._function, self._shown = function, decorator or function
        self._own = _single(self._shown)
        parameters = {**function.parameters, **self._own}
        kinds = {p.kind: p.name for p in (*self._shown.parameters.values(), *parameters.values())}
        self.names = parameters.keys()
        self.single = list({**_single(function), **self._own})
        self.args_name = kinds.get(Parameter.VAR_POSITIONAL, "")
        self.kwargs_name = kinds.get(Parameter.VAR_KEYWORD, "")
        defaults = {name: _REST.get(p.kind, p.default) for name, p in parameters.items()}
        self.defaults = {name: value for name, value in defaults.items() if value is not Parameter.empty}

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Give the arguments of a call their names, or raise the `TypeError` of a call that does not fit."""
        shown = self._shown.bind(*args, **kwargs)
        bound = shown if self._function is self._shown else self._passed_on(shown, args, kwargs)
        is_changed = bound is None
        named, unnamed = _by_name(bound or shown)
        # An unnamed argument of a changed call may belong to any parameter without a name in the call or the decorator.
        sure = named.keys() | self._own.keys() if is_changed and unnamed else self.single
        known = {**self.defaults, **named}
        order = [name for name in self.single if name in known and name in sure] + sorted(named)
        return Call(
            by_parameter={**self.defaults, **(bound or shown).arguments},
            named={name: known[name] for name in order},
            unnamed=unnamed,
            is_changed=is_changed,
            hidden=[name for name in self.single if name not in sure],
        )

    def _passed_on(
        self, shown: inspect.BoundArguments, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments | None:
        """Bind the call to the function; None where the decorator must change some of its arguments."""
        try:
            passed_on = self._function.bind(*args, **kwargs)
        except TypeError:
            return None
        both = shown.arguments.keys() & self._own.keys()
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
