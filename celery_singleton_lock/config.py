"""Options of tasks and settings of apps: where they come from, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.policy import Policy, as_policy

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
_ELSEWHERE = {
    "lock_expiry": "lock_ttl, and a lease is renewed while its task runs",
    "raise_on_duplicate": 'on_duplicate="raise"',
    "once": "unique_on, lock_ttl and on_duplicate",
}
LONGEST = 366 * 86400.0  # seconds: a year, which servers and sockets can express
_SCHEMES = ("redis", "rediss", "redis+socket", "sentinel")


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

    Arguments:
        name: the task's name, for errors.
        given: the task's own options; None means not given.
        setting: gives an app setting by name, or None.

    Raises:
        ConfigurationError: a value cannot be used.
    """
    found = {}
    for option, default in DEFAULTS.items():
        value, source = given.get(option), f"task {name}: {option}"
        if value is None:
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
        raise ConfigurationError(f"{source}={value!r} must be at least 1 second and at most a year")
    if option in _CHOICES and value not in _CHOICES[option]:
        raise ConfigurationError(f"{source}={value!r} must be one of {', '.join(map(repr, _CHOICES[option]))}")
    if option == "on_duplicate" and (isinstance(value, type) or not callable(value)):
        policy = as_policy(value)
        if policy is None:
            raise ConfigurationError(
                f"{source}={value!r} must be 'skip', 'retry', 'raise', a policy object or a callable"
            )
        return policy
    return float(value) if option == "lock_ttl" else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def refuse_unknown(name: str, attributes: Mapping[str, Any], known: set[str]) -> None:
    """Refuse what looks like an option of ours, or of another plugin.

    Raises:
        ConfigurationError: naming task, option and value.
    """
    for attribute, value in attributes.items():
        if attribute in _ELSEWHERE:
            raise ConfigurationError(f"task {name}: {attribute}={value!r}: use {_ELSEWHERE[attribute]} instead")
        if attribute.startswith(("lock_", "on_lock_")) and attribute not in known:
            raise ConfigurationError(f"task {name}: {attribute}={value!r}: there is no such option")


def given_options(cls: type) -> dict[str, Any]:
    """Options as a class and its bases give them, functions unbound."""
    found = {}
    for option in DEFAULTS:
        value = inspect.getattr_static(cls, option, None)
        found[option] = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
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
        conf: its configuration; `get` is used.

    Raises:
        ConfigurationError: a value cannot be used, or there is no store.
    """
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
            tls if _scheme(url) in ("rediss", "sentinel") else None,
        )
    broker = _broker(conf)
    if broker:
        return broker, broker_options, broker_tls
    if is_redis(conf.result_backend):
        return conf.result_backend, result_options, result_tls
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
