"""The scripts of the store: a Lua file for each verb, and parts of verbs for features that few tasks use.

A part is the file ``<verb>_<part>.lua``, or ``any_<part>.lua`` if it is the same for all verbs. It takes the place of the line
``--@<part>`` in the verb's file in calls that use it, so other calls do not pay for it. It may contain such lines of later parts.

The first line of a part names its own KEYS and ARGV, if it has any: ``-- KEYS starts | ARGV limit, window``. They come after
those of the verb, and the code uses these names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from pkgutil import get_data
from typing import Any, NamedTuple

_DECLARED = re.compile(r"(KEYS|ARGV) ([a-z_]+(?:, [a-z_]+)*)")


class Part(NamedTuple):
    """A part of a script call."""

    name: str
    keys: Sequence[str] = ()
    arguments: Sequence[str] = ()


@cache
def script(verb: str, parts: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the text of a script, composed with these parts, and its digest."""
    text = _read(verb)
    names: dict[str, list[str]] = {"KEYS": [], "ARGV": []}
    for part in parts:
        body = _read(f"{verb}_{part}") or _read(f"any_{part}")
        for kind, listed in _DECLARED.findall(body.partition("\n")[0]):
            names[kind] += listed.split(", ")
        text = text.replace(f"--@{part}\n", body)
    comment, _, code = text.partition("\n")  # the first line may be a directive, which has to stay the first
    for kind, found in names.items():
        for place, name in enumerate(found):
            code = f"local {name} = {kind}[#{kind} - {len(found) - place - 1}] {code}"
    text = f"{comment}\n{code}"
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(name: str) -> str:
    """Return the text of a file, "" if there is none."""
    try:
        text: Any = get_data(__package__, f"{name}.lua")
    except FileNotFoundError:
        return ""
    return str(text, "utf-8")
