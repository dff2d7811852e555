"""The scripts of the store: a Lua file for each verb, with sections for features that few tasks use.

A verb's file declares its features after its own KEYS and ARGV: ``--@feature limit  KEYS slots | ARGV slot_limit``. A call that
uses a feature has the feature's words after those of the verb, and the code has them by these names. A section stands between
``--@if limit`` and ``--@end``, and is in the scripts of calls that use the feature, so other calls do not pay for it;
``--@if limit and not kept`` asks for more. ``--@include next`` stands for the file ``_next.lua``, which several verbs share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha1
from pkgutil import get_data
from typing import Any, NamedTuple

_DIRECTIVE = re.compile(r"\s*--@(\w+) *(.*)")
_WORDS = re.compile(r"(KEYS|ARGV) ([a-z_]+(?:, [a-z_]+)*)")


class Words(NamedTuple):
    """Keys and arguments that a call passes for a feature."""

    keys: Sequence[str] = ()
    arguments: Sequence[str] = ()


class Script(NamedTuple):
    """A verb's script for calls that use certain features."""

    text: str
    digest: str
    features: Sequence[str]  # in the order of their words


@cache
def script(verb: str, features: frozenset[str]) -> Script:
    """Return a verb's script.

    Raises:
        ValueError: a feature is not declared, or the sections of the file are wrong.
    """
    declared: dict[str, str] = {}
    around: list[bool] = []  # whether each section around a line is in the script
    first, *code = _lines(verb)  # the first line may be a directive of the server, which has to stay the first
    kept = []
    for line in code:
        found = _DIRECTIVE.fullmatch(line)
        if not found:
            if all(around):
                kept.append(line)
        elif found[1] == "feature":
            name, _, words = found[2].partition(" ")
            declared[name] = words
        elif found[1] == "if":
            conditions = [_holds(verb, one, features, declared) for one in found[2].split(" and ")]
            around.append(all(conditions))
        elif found[1] == "end" and around:
            around.pop()
        else:
            raise ValueError(f"{verb}.lua: wrong line: {line}")
    if around:
        raise ValueError(f"{verb}.lua: a section is not closed")
    if unknown := features - set(declared):
        raise ValueError(f"{verb}.lua declares no feature {', '.join(sorted(unknown))}")
    used = [name for name in declared if name in features]
    text = "\n".join([first, "".join(_locals([declared[name] for name in used])) + kept[0], *kept[1:], ""])
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest(), used)


def _holds(verb: str, condition: str, features: frozenset[str], declared: Mapping[str, str]) -> bool:
    negation, name = (True, condition[4:]) if condition.startswith("not ") else (False, condition)
    if name not in declared:
        raise ValueError(f"{verb}.lua declares no feature {name}")
    return (name in features) != negation


def _locals(declarations: Sequence[str]) -> Iterator[str]:
    """Yield the code that names the words of features. They are counted from the end, as a verb may take any number of them."""
    for kind in ("KEYS", "ARGV"):
        names = [
            name
            for words in declarations
            for one, all_ in _WORDS.findall(words)
            if one == kind
            for name in all_.split(", ")
        ]
        for place, name in enumerate(names):
            yield f"local {name} = {kind}[#{kind} - {len(names) - place - 1}] "


def _lines(name: str) -> Iterator[str]:
    """Yield the lines of a file and of those that it includes."""
    content: Any = get_data(__package__, f"{name}.lua")
    for line in str(content, "utf-8").splitlines():
        found = _DIRECTIVE.fullmatch(line)
        if found and found[1] == "include":
            yield from _lines(f"_{found[2]}")
        else:
            yield line
