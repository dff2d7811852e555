"""Canonical forms: JSON values that are equal exactly where two arguments mean the same work.

A compound form starts with a tag, so forms of different types never meet. A value without a stable form is refused, and
`repr` is never used. Keys hold a digest of the form: BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from operator import methodcaller
from typing import Any
from urllib.parse import quote
from uuid import UUID

from celery_singleton_lock.errors import LockKeyError

MAX_DEPTH = 64
_PLAIN = frozenset({str, float, bool, type(None)})
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
#: Types whose values have a text that is the same everywhere. A datetime is also a date, so it comes first.
_TEXTS: dict[type, Callable[[Any], str]] = {
    bytes: methodcaller("hex"),
    Decimal: str,
    UUID: str,
    datetime: methodcaller("isoformat"),
    date: methodcaller("isoformat"),
    time: methodcaller("isoformat"),
}


def canonical(value: Any, parameter: str, depth: int = 0) -> Any:
    """Return the canonical form of an argument, or of a part of it that lies `depth` levels deep."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return canonical(value.value, parameter, depth)
    # JSON, too, ignores what a subclass makes of these methods.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return _integer(value, parameter)
    if isinstance(value, timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    for kind, text in _TEXTS.items():
        if isinstance(value, kind):
            return [kind.__name__.lower(), text(value)]
    return _container(value, parameter, depth)


def _integer(value: int, parameter: str) -> int:
    try:
        int.__repr__(value)
    except ValueError as error:  # `sys.set_int_max_str_digits`
        raise _refusal(parameter, "an int that is too large to write down has no key") from error
    return int.__int__(value)


def _container(value: Any, parameter: str, depth: int) -> Any:
    kind = f"a value of type {type(value).__qualname__}"
    if depth >= MAX_DEPTH:
        raise _refusal(parameter, f"{kind} that is nested more than {MAX_DEPTH} deep has no key")
    if isinstance(value, (list, tuple)):
        return ["list", *[canonical(item, parameter, depth + 1) for item in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted([canonical(item, parameter, depth + 1) for item in value], key=encoded)]
    if isinstance(value, Mapping):
        return ["dict", {_dict_key(k, parameter): canonical(v, parameter, depth + 1) for k, v in value.items()}]
    raise _refusal(parameter, f"{kind} has no stable form to make a key of")


def _dict_key(key: Any, parameter: str) -> str:
    """Return a dict key as JSON spells it."""
    form = canonical(key, parameter)
    if isinstance(form, list):
        raise _refusal(parameter, f"a value of type {type(key).__qualname__} cannot be a dict key in JSON")
    return form if isinstance(form, str) else encoded(form)


def _refusal(parameter: str, reason: str) -> LockKeyError:
    way_out = "choose parameters with unique_on, or make the key with lock_key"
    return LockKeyError(f"parameter {parameter!r}: {reason}; {way_out}")


def encoded(form: Any) -> str:
    """Return the one JSON text of a canonical form."""
    return _JSON.encode(form)


def digest(form: Any) -> str:
    """Return 32 hex digits that stand for a canonical form."""
    return blake2b(encoded(form).encode(), digest_size=16).hexdigest()


def escaped(name: str) -> str:
    """Return a task name without blanks, control characters and braces, which mark a hash tag in a key."""
    return "".join(
        c if c.isprintable() and c not in "{}% " else quote(c, safe="", errors="surrogatepass") for c in name
    )
