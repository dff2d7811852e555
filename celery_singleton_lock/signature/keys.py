"""Signatures and their keys: the same work gives the same key, on every machine and through every serializer.

An argument is brought to one canonical form, made of JSON types in which every compound value starts with a tag, so that
different values cannot meet; what has no stable form is refused. The form is digested with BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import inspect
import json
import string
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeAlias
from urllib.parse import quote
from uuid import UUID

from celery_singleton_lock.errors import ConfigurationError, SignatureError

MAX_DEPTH = 64
MAX_CALLABLE_KEY = 1024  # bytes

_PLAIN = frozenset({type(None), bool, int, float, str})
_AS_IS = _PLAIN - {int}  #: their values need no look at all
_NUMBERS = frozenset({bool, int, float})
_CONVERT: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_CONTAINERS = frozenset({list, tuple, dict})
_LARGEST = 10**4300  #: CPython's own limit for integers in decimal (`sys.set_int_max_str_digits`)


#: Of a template: a text, and the name of the field that follows it, or None.
Part: TypeAlias = tuple[str, str | None]


def _json_encoder() -> Callable[[Any], str]:
    """JSON with sorted keys and without blanks; `JSONEncoder.encode` makes its C encoder anew at each call (3.10 to 3.13)."""
    plain = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    try:
        in_c = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", True, False, True)
    except TypeError:  # it is CPython's own, and undocumented
        return plain.encode
    return lambda form: "".join(in_c(form, 0))


_json = _json_encoder()


def canonical(value: Any, where: str, depth: int = 0) -> Any:
    """The canonical form of a value.

    Arguments:
        value: an argument, or a part of one.
        where: the parameter's name, for the error.
        depth: how deep the value lies in the argument.

    Raises:
        SignatureError: the value has no stable form.
    """
    kind = type(value)
    if kind is int and not abs(value) < _LARGEST:
        raise _refused(where, "an int that is too large to write down has no key")
    if kind in _PLAIN:
        return value
    if kind in _CONTAINERS:
        return _container(value, where, depth)
    if isinstance(value, Enum):
        return canonical(value.value, where, depth)
    return _scalar(value) or _subclass(value, where, depth)


def _refused(where: str, why: str) -> SignatureError:
    return SignatureError(
        f"parameter {where!r}: {why}; choose parameters with unique_on, or make the key with lock_key"
    )


def _name(value: Any) -> str:
    return type(value).__qualname__


def _encode(form: Any) -> str:
    try:
        return _json(form)
    except ValueError as error:  # sys.set_int_max_str_digits
        raise SignatureError("an integer in the arguments is too large to make a key of") from error


def _scalar(value: Any) -> Any:
    """The form of what holds no other values; None where it is something else."""
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, (Decimal, UUID)):
        return ["decimal" if isinstance(value, Decimal) else "uuid", str(value)]
    if isinstance(value, (datetime, date, time)):
        kind = "datetime" if isinstance(value, datetime) else "date" if isinstance(value, date) else "time"
        return [kind, value.isoformat()]
    if isinstance(value, timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    return None


def _subclass(value: Any, where: str, depth: int) -> Any:
    """The form of what has the plain types, or containers, among its bases."""
    for plain, convert in _CONVERT.items():
        if isinstance(value, plain):
            return canonical(convert(value), where, depth)
    return _container(value, where, depth)


def _container(value: Any, where: str, depth: int) -> Any:
    if depth >= MAX_DEPTH:
        raise _refused(where, f"a value of type {_name(value)} that is nested more than {MAX_DEPTH} deep has no key")
    if isinstance(value, (list, tuple)):
        return ["list", *[x if type(x) in _AS_IS else canonical(x, where, depth + 1) for x in value]]
    if isinstance(value, (dict, Mapping)):  # of an abstract class alone the answer takes long
        return ["dict", _members(value, where, depth + 1)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted((canonical(item, where, depth + 1) for item in value), key=_encode)]
    raise _refused(where, f"a value of type {_name(value)} has no stable form to make a key of")


def _members(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    return {
        k if type(k) is str else _json_key(k, where): v if type(v) in _AS_IS else canonical(v, where, depth)
        for k, v in value.items()
    }


def _json_key(key: Any, where: str) -> str:
    """A dict key as `json.dumps` spells it."""
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return _encode(canonical(key, where))
    raise _refused(where, f"a value of type {_name(key)} cannot be a dict key in JSON")


def digest(form: Any) -> str:
    """32 hex digits that stand for a canonical form.

    Raises:
        SignatureError: an integer is too large to be written in decimal (`sys.set_int_max_str_digits`).
    """
    return blake2b(_encode(form).encode(), digest_size=16).hexdigest()


def escaped(text: str) -> str:
    """A task name fit for a key: without braces (they mark a cluster's hash tag), blanks or control characters."""
    return "".join(
        c if c.isprintable() and c not in "{}% " else quote(c, safe="", errors="surrogatepass") for c in text
    )


class Binder:
    """`Signature.bind`, without its walk through the parameters for a call that just fits them.

    All other calls go to `bind` itself, for its errors, and so do those of tasks with ``*args``, ``**kwargs`` or
    positional-only parameters.

    Arguments:
        signature: the parameters.

    Attributes:
        names: of all parameters.
        single: of those that take one argument.
        absent: by name, what a parameter that is not passed has.
        extra_args, extra_kwargs: names of ``*args`` and ``**kwargs``, empty where there is none.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = signature.parameters.values()
        nothing = signature.bind_partial()
        nothing.apply_defaults()
        self.names = list(signature.parameters)
        self.absent = nothing.arguments
        self.extra_args = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        self.extra_kwargs = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
        self.single = [name for name in self.names if name not in (self.extra_args, self.extra_kwargs)]
        self._signature = signature
        self._is_plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._required = {p.name for p in parameters if p.default is p.empty}

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was passed, by name and in the order of the parameters.

        Raises:
            TypeError: the call does not fit the parameters.
        """
        if self._is_plain:
            named = dict(zip(self._positional, args, strict=False))
            if kwargs:
                given = {**named, **kwargs}
                named = {name: given[name] for name in self.names if name in given}
            if len(named) == len(args) + len(kwargs) and self._required <= named.keys():
                return named
        return self._signature.bind(*args, **kwargs).arguments

    def named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these arguments that have a name of their own, the content of ``**kwargs`` included."""
        own = {name: arguments[name] for name in self.single if name in arguments}
        return {**arguments.get(self.extra_kwargs, {}), **own}


@dataclass(frozen=True)
class KeyFunction:
    """A `lock_key` that is a callable, and what it is called with: arguments by name, defaults filled in.

    Arguments:
        call: the callable.
        signature: its parameters.
        own: their names.
        names: the task's parameters in their order, without ``*args`` and ``**kwargs``.
        defaults: by name, the defaults of those that have one.
    """

    call: Callable[..., str]
    signature: inspect.Signature
    own: Binder
    names: Sequence[str]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, call: Callable[..., str], binders: Sequence[Binder]) -> KeyFunction:
        """Check what the callable needs against the parameters of the task.

        Raises:
            ConfigurationError: the task does not have what it needs; the text starts with option and value.
        """
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError) as error:  # of some builtins
            raise ConfigurationError(f"lock_key={call!r}: its parameters are unknown, put it in a function") from error
        own, names = Binder(signature), [name for binder in binders for name in binder.single]
        for name in own.single:
            if name in names or name in own.absent:
                continue
            if name in ("self", "cls"):
                raise ConfigurationError(
                    f"lock_key={call!r}: it gets the arguments of the task and no {name!r}, make it a staticmethod"
                )
            if not any(binder.extra_kwargs for binder in binders):
                raise ConfigurationError(f"lock_key={call!r}: it needs {name!r}, which is no parameter of the task")
        defaults = {name: value for one in binders for name, value in one.absent.items() if name in names}
        return cls(call, signature, own, names, defaults)

    def key(self, named: Mapping[str, Any], extra: Sequence[Any], hidden: bool = False) -> str:
        """The key of a call.

        Arguments:
            named: its arguments by name.
            extra: those without a name.
            hidden: some of `extra` may belong to parameters that have a name.

        Raises:
            SignatureError: the callable needs what is not passed by name, or returns no `str`, or a long one.
        """
        known = dict(named) if hidden else {**self.defaults, **named}
        rest = {name: known[name] for name in (*self.names, *known) if name in known}
        given: dict[str, Any] = {}
        for name in self.own.single:
            if name in rest:
                given[name] = rest.pop(name)
            elif name not in self.own.absent or (hidden and name in self.names):
                raise SignatureError(f"parameter {name!r}: lock_key needs it, and the call does not pass it by name")
        if self.own.extra_kwargs:
            given[self.own.extra_kwargs], rest = rest, {}
        if self.own.extra_args:
            given[self.own.extra_args] = (*rest.values(), *extra)
        bound = inspect.BoundArguments(self.signature, given)
        bound.apply_defaults()
        return _checked(self.call(*bound.args, **bound.kwargs))


@dataclass(frozen=True)
class KeyBuilder:
    """How the arguments of one task become a form to digest.

    Arguments:
        binder: gives the arguments their names, as parameters of `run` that the caller sees.
        shown: the same for a decorator of `run` that has parameters of its own, or None.
        absent: by name, what a parameter that is not passed has.
        defaults: encoded forms of the defaults.
        unique_on: names of the parameters that count, or None for all.
        template: the parts of a template that makes the key instead, or None.
        function: makes the key instead, or None.
    """

    binder: Binder
    shown: Binder | None
    absent: Mapping[str, Any]
    defaults: Mapping[str, Any]
    unique_on: Sequence[str] | None = None
    template: Sequence[Part] | None = None
    function: KeyFunction | None = None

    @classmethod
    def of(
        cls,
        signature: inspect.Signature,
        unique_on: str | Sequence[str] | None = None,
        lock_key: str | Callable[..., str] | None = None,
        shown: inspect.Signature | None = None,
    ) -> KeyBuilder:
        """Check the options against the parameters.

        Arguments:
            signature: the parameters of the task.
            unique_on, lock_key: the options.
            shown: the parameters of a decorator around it, which a call has to fit.

        Raises:
            ConfigurationError: an option cannot be used; the text starts with option and value.
        """
        names = [unique_on] if isinstance(unique_on, str) else unique_on
        if names is not None and not (isinstance(names, (list, tuple, set, frozenset)) and _all_str(names)):
            raise ConfigurationError(f"unique_on={unique_on!r} must be names of parameters")
        if lock_key == "" or not (lock_key is None or isinstance(lock_key, str) or callable(lock_key)):
            raise ConfigurationError(f"lock_key={lock_key!r} must be a template or a callable")
        if names is not None and lock_key is not None:
            raise ConfigurationError(f"unique_on={unique_on!r} with lock_key={lock_key!r}: give one of them")
        signatures = [signature] if shown is None else [signature, shown]
        binders = [Binder(one) for one in signatures]
        parameters = {name for binder in binders for name in binder.names}
        _known(names or (), parameters, f"unique_on={unique_on!r}")
        template = _parts(lock_key) if isinstance(lock_key, str) else None
        _known(_fields(template or ()), parameters, f"lock_key={lock_key!r}")
        return cls(
            binders[0],
            binders[1] if shown else None,
            {name: value for binder in binders for name, value in binder.absent.items()},
            {name: form for one in signatures for name, form in _canonical_defaults(one).items()},
            None if names is None else tuple(sorted(set(names))),
            template,
            KeyFunction.of(lock_key, binders) if callable(lock_key) else None,
        )

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The canonical form of a call.

        Raises:
            TypeError: the call does not fit the parameters.
            SignatureError: an argument that counts has no stable form, or is hidden by a decorator.
        """
        if self.shown is None:
            bound = self.binder.arguments(args, kwargs)
        else:
            shown = self.shown.arguments(args, kwargs)
            behind = self._behind(self.shown, shown, args, kwargs)
            if behind is None:
                return self._shown_form(self.shown, shown)
            bound = behind
        if self.function is not None:
            extra = bound.get(self.binder.extra_args, ())
            return ["key", self.function.key(self.binder.named(bound), extra)]
        if self.template is not None:
            return ["template", *_filled(self.template, {**self.absent, **bound})]
        return ["call", self._counting(bound)]

    def _behind(
        self, binder: Binder, shown: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """The arguments as a decorator passes them on that changes none; None where this one must change some.

        That is: the call does not fit the function behind the decorator, or both have a name for different arguments.
        """
        try:
            bound = self.binder.arguments(args, kwargs)
        except TypeError:
            return None
        both = [name for name in binder.single if name in shown]
        return bound if all(name in bound and bound[name] is shown[name] for name in both) else None

    def _shown_form(self, binder: Binder, shown: Mapping[str, Any]) -> Any:
        """The form of a call whose arguments a decorator changes: only what is passed by name is sure to be that."""
        if self.function is None and self.template is None and self.unique_on is None:
            return ["decorated", self._counting(shown)]
        named, extra = binder.named(shown), shown.get(binder.extra_args, ())
        if self.function is not None:
            return ["key", self.function.key(named, extra, hidden=bool(extra))]
        for name in self.unique_on or _fields(self.template or ()):
            if name not in named and (extra or name not in self.absent):
                raise SignatureError(
                    f"parameter {name!r}: a decorator of the task hides which argument it is; "
                    "pass it by keyword, or make the key with a callable lock_key"
                )
        if self.template is not None:
            return ["template", *_filled(self.template, {**self.absent, **named})]
        return ["call", self._counting(named)]

    def _counting(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that count and differ from their default, so that a new parameter changes no old key."""
        names = bound if self.unique_on is None else [name for name in self.unique_on if name in bound]
        defaults, absent, forms = self.defaults, self.absent, {}
        for name in names:
            value = bound[name]
            form = value if type(value) in _AS_IS else canonical(value, name)
            if name in defaults:
                default = absent[name]
                # Numbers that differ are written differently, but for NaN; strings may not be (surrogates).
                differs = type(value) is type(default) and type(value) in _NUMBERS and value == value != default
                if not differs and _encode(form) == defaults[name]:
                    continue
            forms[name] = form
        return forms


def _filled(template: Sequence[Part], arguments: Mapping[str, Any]) -> list[Any]:
    """The template's texts and, each in a list of its own, the forms of its fields."""
    parts: list[Any] = []
    for text, name in template:
        parts.append(text)
        if name is not None:
            parts.append([canonical(arguments[name], name)])
    return parts


def _all_str(names: Any) -> bool:
    return all(isinstance(name, str) for name in names)


def _known(names: Collection[str], parameters: Set[str], option: str) -> None:
    for name in names:
        if name not in parameters:
            raise ConfigurationError(f"{option}: {name!r} is no parameter of the task")


def _fields(template: Sequence[Part]) -> list[str]:
    return [name for _, name in template if name is not None]


def _parts(template: str) -> list[Part]:
    """The parts of a template that has nothing but plain names."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"lock_key={template!r}: {error}") from error
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise ConfigurationError(f"lock_key={template!r}: a field must be a plain parameter name")
    return [(text, name) for text, name, _, _ in parts]


def _canonical_defaults(signature: inspect.Signature) -> dict[str, str]:
    """Encoded forms of the defaults; one without a stable form never counts as equal to an argument."""
    defaults = {}
    for name, parameter in signature.parameters.items():
        if parameter.default is not parameter.empty:
            try:
                defaults[name] = _encode(canonical(parameter.default, name))
            except SignatureError:
                continue
    return defaults


def _checked(key: Any) -> str:
    if not isinstance(key, str):
        raise SignatureError(f"lock_key returned a value of type {_name(key)}, not a str")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_CALLABLE_KEY:
        raise SignatureError(f"lock_key returned more than {MAX_CALLABLE_KEY} bytes")
    return key
