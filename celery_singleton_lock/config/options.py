"""Options of tasks and settings of apps: where they come from, and what is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policies import Policy, as_policy

#: Task options and their defaults. The app setting of an option is ``singleton_`` and its name.
DEFAULTS: Mapping[str, Any] = {
    "singleton": True,
    "unique_on": None,
    "lock_key": None,
    "on_duplicate": "skip",
    "lock_ttl": 30.0,
    "on_lock_lost": "warn",
    "on_store_error": "retry",
}
_CHOICES = {"on_lock_lost": ("warn", "raise"), "on_store_error": ("retry", "run", "raise")}
#: Two ways to say which calls are the same work.
_SAME_WORK = ("unique_on", "lock_key")
#: All app settings.
_SETTINGS = {
    *(f"singleton_{option}" for option in DEFAULTS),
    "singleton_lock_url",
    "singleton_lock_prefix",
    "singleton_lock_eager",
    "singleton_lock_store_timeout",
    "singleton_lock_pool_limit",
}
#: Names that other plugins, or other habits, have for options.
_FOREIGN_OPTIONS = {
    "lock_expiry": "lock_ttl (a lease is renewed while its task runs)",
    "raise_on_duplicate": 'on_duplicate="raise"',
    "once": "unique_on, lock_ttl and on_duplicate",
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
    "singleton_raise_on_duplicate": 'singleton_on_duplicate="raise"',
    "singleton_lock_expiry": "singleton_lock_ttl (a lease is renewed while its task runs)",
}
LONGEST = 366 * 86400.0  # seconds: a year, which servers and sockets can express
_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "redis+socket", "sentinel")


@dataclass(frozen=True)
class Options:
    """The options of one task, checked."""

    singleton: bool
    unique_on: str | Sequence[str] | None
    lock_key: str | Callable[..., str] | None
    on_duplicate: Policy | Callable[..., Any]
    lock_ttl: float
    on_lock_lost: str
    on_store_error: str


def options_of(name: str, given: Mapping[str, Any], setting: Callable[[str], Any]) -> Options:
    """The options of a task: its own, else the app's settings, else the defaults.

    A task that has `unique_on` or `lock_key` of its own replaces both settings.

    Arguments:
        name: the task's name, for errors.
        given: the task's own options; None means not given.
        setting: gives an app setting by name, or None.

    Raises:
        ConfigurationError: a value cannot be used.
    """
    found = {}
    has_own = any(given.get(option) is not None for option in _SAME_WORK)
    for option, default in DEFAULTS.items():
        value, source = given.get(option), f"task {name}: {option}"
        if value is None and not (has_own and option in _SAME_WORK):
            value, source = setting(f"singleton_{option}"), f"setting singleton_{option} (task {name})"
        found[option] = checked(option, default if value is None else value, source)
    return Options(**found)


def checked(option: str, value: Any, source: str) -> Any:
    """The value of one option in the form used.

    Raises:
        ConfigurationError: it cannot be used; the text names the source, which names task and option, and the value.
    """
    if option == "singleton" and not isinstance(value, bool):
        raise ConfigurationError(f"{source}={value!r} must be True or False")
    if option == "lock_ttl" and not (_is_number(value) and 1 <= value <= LONGEST):
        raise ConfigurationError(f"{source}={value!r} must be a number of seconds, from 1 to a year")
    if option in _CHOICES and value not in _CHOICES[option]:
        raise ConfigurationError(f"{source}={value!r} must be one of {', '.join(map(repr, _CHOICES[option]))}")
    if option == "on_duplicate" and (isinstance(value, type) or not callable(value)):
        policy = as_policy(value)
        if policy is None:
            raise ConfigurationError(
                f"{source}={value!r} must be 'skip', 'retry', 'raise', a policy object or a callable"
            )
        return policy
    if option == "on_duplicate" and not _takes_two(value):
        raise ConfigurationError(f"{source}={value!r} must take two arguments, the task and the holder")
    return float(value) if option == "lock_ttl" else value


def _takes_two(call: Callable[..., Any]) -> bool:
    try:
        inspect.signature(call).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # one that is written in C may not tell
        pass
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def refuse_unknown(name: str, attributes: Mapping[str, Any]) -> None:
    """Refuse data attributes that look like an option of ours, or of another plugin. Functions and methods pass.

    Raises:
        ConfigurationError: naming task, option and value.
    """
    for attribute, value in attributes.items():
        if attribute in DEFAULTS or not _is_data(value):
            continue
        if attribute in _FOREIGN_OPTIONS:
            raise ConfigurationError(f"task {name}: {attribute}={value!r}: use {_FOREIGN_OPTIONS[attribute]} instead")
        meant = next((option for option in DEFAULTS if _is_near(attribute, option)), "")
        if attribute in _SETTINGS:
            meant = attribute.removeprefix("singleton_")  # the setting's name in place of the option's
        if meant or attribute.startswith(("lock_", "on_lock_")) or attribute in _SETTINGS:
            hint = f", do you mean {meant}?" if meant else ""
            raise ConfigurationError(f"task {name}: {attribute}={value!r}: there is no such option{hint}")


def _is_data(value: Any) -> bool:
    """Whether this is neither a function, nor something else that a class body or a module defines or imports."""
    return isinstance(value, type) or not (
        callable(value) or hasattr(value, "__get__") or isinstance(value, ModuleType)
    )


def _is_near(one: str, other: str) -> bool:
    """Whether one letter was added, left out or replaced, or two neighbours were swapped."""
    if len(one) == len(other):
        places = [i for i, letters in enumerate(zip(one, other, strict=True)) if letters[0] != letters[1]]
        swapped = len(places) == 2 and [one[i] for i in places] == [other[i] for i in reversed(places)]
        return len(places) <= 1 or (swapped and places[1] - places[0] == 1)
    short, long = sorted((one, other), key=len)
    return short in {long[:i] + long[i + 1 :] for i in range(len(long))}


def given_options(cls: type) -> dict[str, Any]:
    """Options as a class and its bases give them: functions unbound, class methods bound to the class."""
    found = {}
    for option in DEFAULTS:
        value = inspect.getattr_static(cls, option, None)
        found[option] = value.__get__(None, cls) if isinstance(value, (staticmethod, classmethod)) else value
    return found


@dataclass(frozen=True)
class Settings:
    """The app's settings of the store, checked.

    Arguments:
        url: the store.
        prefix: first part of every key.
        store_timeout: seconds for a whole store call.
        pool_limit: connections of a process with many bodies at once.
        options: Celery's transport options that go with the URL.
        tls: Celery's certificate options that go with the URL, or None.
    """

    url: str
    prefix: str = "singleton"
    store_timeout: float = 1.0
    pool_limit: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)
    tls: Mapping[str, Any] | None = None


def settings_of(conf: Any) -> Settings:
    """The settings of an app.

    Arguments:
        conf: its configuration.

    Raises:
        ConfigurationError: a value cannot be used, a setting is unknown, or there is no store.
    """
    _refuse_unknown_settings(conf)
    url, options, tls = _store(conf)
    prefix = _given(conf, "singleton_lock_prefix", "singleton")
    if not isinstance(prefix, str) or not prefix or set(prefix) & set("{}"):
        raise ConfigurationError(f"singleton_lock_prefix={prefix!r} must be a text without braces")
    timeout = _given(conf, "singleton_lock_store_timeout", 1.0)
    if not (_is_number(timeout) and 0 < timeout <= LONGEST):
        raise ConfigurationError(
            f"singleton_lock_store_timeout={timeout!r} must be a number of seconds above 0 and at most a year"
        )
    limit = _given(conf, "singleton_lock_pool_limit", 10)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigurationError(f"singleton_lock_pool_limit={limit!r} must be a number from 1")
    eager = _given(conf, "singleton_lock_eager", False)
    if not isinstance(eager, bool):
        raise ConfigurationError(f"singleton_lock_eager={eager!r} must be True or False")
    prefix = str(options.get("global_keyprefix") or "") + prefix
    if set(prefix) & set("{}"):
        raise ConfigurationError(f"global_keyprefix={options.get('global_keyprefix')!r} must be a text without braces")
    return Settings(url, prefix, float(timeout), limit, options, tls)


def _refuse_unknown_settings(conf: Any) -> None:
    """Refuse settings that look like ours and that nobody reads. Their values are not shown: they may hold a password."""
    keys = [str(key) for key in conf]  # Celery loads the configuration now
    prefix = str(conf.prefix or "")  # of a namespace such as Django's: CELERY_
    for key in keys:
        lower = key.lower()
        name = lower.removeprefix(prefix.lower()).removeprefix("celery_")
        if not name.startswith("singleton_"):
            continue
        spelt = (prefix + name).upper() if prefix.isupper() else prefix.lower() + name  # `celery.utils.text.match_case`
        if name in _SETTINGS:
            if key not in (name, spelt) and conf.get(name) is None:
                raise ConfigurationError(f"setting {key} is not read: its name here is {spelt}")
        elif (key == name or lower == spelt.lower()) and _is_data(conf.get(key)):
            _refuse_setting(key, name)


def _refuse_setting(key: str, name: str) -> None:
    if name not in _FOREIGN_SETTINGS:
        meant = next((setting for setting in sorted(_SETTINGS) if _is_near(name, setting)), "")
        hint = f", do you mean {meant}?" if meant else ""
        raise ConfigurationError(f"setting {key}: there is no such setting{hint}")
    if "celery_singleton" not in sys.modules:  # while it is there, tasks are on their way from it to us
        raise ConfigurationError(f"setting {key} is one of celery-singleton's: use {_FOREIGN_SETTINGS[name]} instead")


def _given(conf: Any, name: str, default: Any) -> Any:
    """A setting; None means not given, as for the options of tasks."""
    value = conf.get(name)
    return default if value is None else value


def _store(conf: Any) -> tuple[str, Mapping[str, Any], Mapping[str, Any] | None]:
    """The store's URL, with the transport and certificate options that Celery's settings hold for it."""
    broker_options = conf.get("broker_transport_options") or {}
    result_options = conf.get("result_backend_transport_options") or {}
    broker_tls, result_tls = _tls(conf.get("broker_use_ssl")), _tls(conf.get("redis_backend_use_ssl"))
    url = conf.get("singleton_lock_url")
    if url is not None:
        several = isinstance(url, str) and ";" in url and _scheme(url) != "sentinel"
        if several or not (is_redis(url) or url == "memory://"):
            raise ConfigurationError(
                f"singleton_lock_url must be memory:// or one of {', '.join(s + '://' for s in _SCHEMES)}"
            )
        options = {**broker_options, **result_options, "global_keyprefix": None}
        tls = broker_tls if result_tls is None else result_tls
        return (
            url,
            options if _scheme(url) == "sentinel" else {},
            tls if _scheme(url) in ("rediss", "valkeys", "sentinel") else None,
        )
    broker = _broker(conf)
    if broker:
        return broker, broker_options, broker_tls
    if is_redis(conf.result_backend):
        provider = conf.get("redis_backend_credential_provider")
        return conf.result_backend, {**result_options, "credential_provider": provider}, result_tls
    raise ConfigurationError("no store for locks: set singleton_lock_url (neither broker nor result backend is Redis)")


def _broker(conf: Any) -> str | None:
    """The broker's URL if it is Redis and there is just one."""
    urls = {_joined(url) for url in (conf.broker_url, conf.broker_read_url, conf.broker_write_url) if url}
    first = next(iter(urls), "")
    if not any(map(is_redis, urls)):
        return None
    if len(urls) > 1 or (";" in first and _scheme(first) != "sentinel"):
        raise ConfigurationError("the broker has several URLs: set singleton_lock_url to the one store of locks")
    return first


def _joined(url: Any) -> str:
    return ";".join(url) if isinstance(url, (list, tuple)) else str(url)


def is_redis(url: Any) -> bool:
    """Whether a URL names a Redis server, as Celery spells URLs."""
    return isinstance(url, str) and _scheme(url) in _SCHEMES


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _tls(value: Any) -> Mapping[str, Any] | None:
    """What Celery's *_use_ssl say of Redis certificates; True means the defaults."""
    if isinstance(value, Mapping):
        value = {name: option for name, option in value.items() if name.startswith("ssl_")}
    return value if isinstance(value, Mapping) else {} if value else None
