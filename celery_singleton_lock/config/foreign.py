"""Finds names that resemble options or settings of this library and are none: misspelt ones, and other plugins'."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from celery_singleton_lock.config.options import SETTING_NAMES, TASK_OPTIONS, spelling
from celery_singleton_lock.errors import ConfigurationError

#: Options of other plugins and frequent guesses, each with what it is called here. Those plugins lock when a call is published.
_FOREIGN_OPTIONS = {
    "lock_expiry": 'lock_at_most or lock_at_least, with lock_from="publish"',
    "raise_on_duplicate": 'on_duplicate="raise" with lock_from="publish"',
    "once": 'unique_on, on_duplicate and lock_until="start" or lock_at_most, with lock_from="publish"',
    "heimdall": 'lock_key, on_duplicate, lock_at_most and lock_at_least, with lock_from="publish"',
    "ttl": "lock_ttl",
    "unique": "unique_on",
    "unique_key": "unique_on or lock_key",
}
#: Settings of celery-singleton.
_FOREIGN_SETTINGS = {
    "singleton_backend_url": "singleton_lock_url",
    "singleton_backend_class": "singleton_lock_url",
    "singleton_backend_kwargs": "singleton_lock_url",
    "singleton_key_prefix": "singleton_lock_prefix",
    "singleton_raise_on_duplicate": 'singleton_on_duplicate="raise" with singleton_lock_from="publish"',
    "singleton_lock_expiry": 'singleton_lock_at_most or singleton_lock_at_least, with singleton_lock_from="publish"',
}


def unknown_options(task: str, attributes: Mapping[str, Any]) -> Iterator[str]:
    """Name data attributes that resemble an option. Functions and methods may have any name."""
    for name, value in attributes.items():
        advice = _advice(name)
        if advice and _is_data(value):
            yield f"task {task}: {name}={value!r}: {advice}"


@lru_cache(1000)
def _advice(name: str) -> str:
    """Return what is said of data with this name, "" if nothing. It is kept, as all tasks have Celery's attributes."""
    if name in TASK_OPTIONS:
        return ""
    if name in _FOREIGN_OPTIONS:
        return f"use {_FOREIGN_OPTIONS[name]} instead"
    is_setting = name in SETTING_NAMES
    near = _nearest(name.removeprefix("singleton_") if is_setting else name, TASK_OPTIONS)
    if near or is_setting or name.startswith(("lock_", "on_lock_")):
        return f"there is no such option{_hint(near)}"
    return ""


def refuse_keywords(task: str, given: Mapping[str, Any]) -> None:
    """Refuse keywords of a call that Celery would ignore: our options, and those of other plugins."""
    for name, value in given.items():
        if name in _FOREIGN_OPTIONS:
            advice = f"use {_FOREIGN_OPTIONS[name]} instead, as options of the task; for one call: lock_options={{…}}"
        elif name in TASK_OPTIONS or (name.startswith("lock_") and name != "lock_options"):
            advice = "options of one call are given as lock_options={…}"
        else:
            continue
        raise ConfigurationError(f"task {task}: {name}={value!r}: {advice}")


def unknown_settings(conf: Any) -> Iterator[str]:
    """Name settings that resemble ours and have no effect. Their values are not shown: they may hold a password."""
    keys = [str(key) for key in conf]  # Celery loads the configuration now
    prefix = str(conf.prefix or "")  # of a namespace such as Django's: CELERY_
    for key in keys:
        name = key.lower().removeprefix(prefix.lower()).removeprefix("celery_")
        if not name.startswith("singleton_"):
            continue
        spelt = spelling(conf, name)
        if name in SETTING_NAMES:
            if key not in (name, spelt) and conf.get(name) is None:
                yield f"setting {key} is not read: its name here is {spelt}"
        elif (key == name or key.lower() == spelt.lower()) and _is_data(conf.get(key)):
            if name not in _FOREIGN_SETTINGS:
                near = _nearest(name, sorted(SETTING_NAMES))
                yield f"setting {key}: there is no such setting{_hint(near and spelling(conf, near))}"
            elif "celery_singleton" not in sys.modules:  # an app that imports it is moving from it to this library
                yield f"setting {key} is celery-singleton's: use {_spelt_in(conf, _FOREIGN_SETTINGS[name])} instead"


def _spelt_in(conf: Any, advice: str) -> str:
    """Return what is said of settings, with their names as this configuration spells them."""
    return re.sub(r"\bsingleton_\w+", lambda name: spelling(conf, name[0]), advice)


def _hint(meant: str) -> str:
    return f", do you mean {meant}?" if meant else ""


def _nearest(name: str, known: Collection[str]) -> str:
    """Return the known name that is one edit away, "" if there is none."""
    return next((other for other in known if _is_near(name, other)), "")


def _is_near(one: str, other: str) -> bool:
    """Whether at most one letter was added, left out or replaced, or two neighbours were swapped."""
    short, long = sorted((one, other), key=len)
    first = next((place for place, letter in enumerate(short) if letter != long[place]), len(short))
    short, long = short[first:], long[first:]
    return long[1:] in (short, short[1:]) or (long[:2] == short[:2][::-1] and long[2:] == short[2:])


def _is_data(value: Any) -> bool:
    """Whether a value is neither a function nor anything else that a class body or a module defines or imports."""
    return isinstance(value, type) or not (
        callable(value) or hasattr(value, "__get__") or isinstance(value, ModuleType)
    )
