"""Signatures and their keys: the same work gives the same key, on every machine and through every serializer.

An argument is brought to one canonical form, made of JSON types in which every compound value starts with a tag, so that
different values cannot meet; what has no stable form is refused. The form is digested with BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import inspect
import json
import string
from collections.abc import Callable, Mapping, Sequence
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
        raise _refused(where, f"a {type(value).__qualname__} that is nested more than {MAX_DEPTH} deep has no key")
    if isinstance(value, (list, tuple)):
        return ["list", *[x if type(x) in _AS_IS else canonical(x, where, depth + 1) for x in value]]
    if isinstance(value, (dict, Mapping)):  # of an abstract class alone the answer takes long
        return ["dict", _members(value, where, depth + 1)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted((canonical(item, where, depth + 1) for item in value), key=_encode)]
    raise _refused(where, f"a {type(value).__qualname__} has no stable form to make a key of")


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
    raise _refused(where, f"a {type(key).__qualname__} cannot be a dict key in JSON")


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
        absent: by name, what a parameter that is not passed has.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = signature.parameters.values()
        nothing = signature.bind_partial()
        nothing.apply_defaults()
        self.absent = nothing.arguments
        self._signature = signature
        self._is_plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._names = list(signature.parameters)
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
                named = {name: given[name] for name in self._names if name in given}
            if len(named) == len(args) + len(kwargs) and self._required <= named.keys():
                return named
        return self._signature.bind(*args, **kwargs).arguments


@dataclass(frozen=True)
class KeyPlan:
    """How the arguments of one task become a form to digest.

    Arguments:
        binder: gives the arguments their names, as parameters of `run` that the caller sees.
        defaults: encoded forms of the defaults.
        unique_on: names of the parameters that count, or None for all.
        lock_key: a template or a callable that makes the key instead, or None.
        template: the parts of the template, if it is one.
    """

    binder: Binder
    defaults: Mapping[str, Any]
    unique_on: Sequence[str] | None = None
    lock_key: str | Callable[..., str] | None = None
    template: Sequence[Part] = ()

    @classmethod
    def of(
        cls,
        signature: inspect.Signature,
        unique_on: str | Sequence[str] | None = None,
        lock_key: str | Callable[..., str] | None = None,
    ) -> KeyPlan:
        """Check the options against the parameters.

        Raises:
            ConfigurationError: a name is no parameter, or the template is not plain; the text starts with option and value.
        """
        names = [unique_on] if isinstance(unique_on, str) else unique_on
        if names is not None and not (isinstance(names, (list, tuple, set, frozenset)) and _all_str(names)):
            raise ConfigurationError(f"unique_on={unique_on!r} must be names of parameters")
        _known(names or (), signature, f"unique_on={unique_on!r}")
        template = _parts(lock_key) if isinstance(lock_key, str) else ()
        _known([name for _, name in template if name is not None], signature, f"lock_key={lock_key!r}")
        if not isinstance(lock_key, str) and lock_key is not None and not callable(lock_key):
            raise ConfigurationError(f"lock_key={lock_key!r} must be a template or a callable")
        chosen = None if names is None else tuple(sorted(set(names)))
        return cls(Binder(signature), _canonical_defaults(signature), chosen, lock_key, template)

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The canonical form of a call.

        Raises:
            TypeError: the call does not fit the parameters.
            SignatureError: an argument that counts has no stable form.
        """
        if callable(self.lock_key):
            return ["key", _checked(self.lock_key(*args, **kwargs))]
        if self.lock_key is None:
            return ["call", self._counting(self.binder.arguments(args, kwargs))]
        return ["template", *_filled(self.template, {**self.binder.absent, **self.binder.arguments(args, kwargs)})]

    def _counting(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that count and differ from their default, so that a new parameter changes no old key."""
        names = bound if self.unique_on is None else [name for name in self.unique_on if name in bound]
        defaults, absent, forms = self.defaults, self.binder.absent, {}
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


def _known(names: Any, signature: inspect.Signature, option: str) -> None:
    for name in names:
        if name not in signature.parameters:
            raise ConfigurationError(f"{option}: {name!r} is no parameter of the task")


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
        raise SignatureError(f"lock_key returned a {type(key).__qualname__}, not a str")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_CALLABLE_KEY:
        raise SignatureError(f"lock_key returned more than {MAX_CALLABLE_KEY} bytes")
    return key
