"""The settings of an app: which store keeps its locks, and how the store is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_singleton_lock.config.foreign import unknown_settings
from celery_singleton_lock.config.options import (
    APP_SETTINGS,
    SENTINEL_SCHEMES,
    STORE_SCHEMES,
    TASK_OPTIONS,
    Settings,
    scheme_of,
    spelling,
)
from celery_singleton_lock.config.problems import Problems
from celery_singleton_lock.errors import ConfigurationError


def settings_of(conf: Any) -> Settings:
    """Read the settings of an app from its configuration, and check those for options of tasks, too.

    Raises:
        ConfigurationError: values cannot be used, settings are unknown, or there is no store.
    """
    problems = Problems()
    problems.add(unknown_settings(conf))
    found: dict[str, Any] = {}
    for name, setting in APP_SETTINGS.items():
        with problems:
            found[name.removeprefix("singleton_lock_")] = setting.checked(conf.get(name), spelling(conf, name))
    for option, row in TASK_OPTIONS.items():
        with problems:
            row.checked(conf.get(f"singleton_{option}"), spelling(conf, f"singleton_{option}"))
    if "url" in found:
        with problems:
            found["url_name"], found["url"], found["options"], found["tls"] = _store(conf, found["url"])
    problems.refuse()
    prefix = f"{found['options'].get('global_keyprefix') or ''}{found['prefix']}"
    source = f"{spelling(conf, 'singleton_lock_prefix')} after global_keyprefix"
    found["prefix"] = APP_SETTINGS["singleton_lock_prefix"].checked(prefix, source)
    found["url_name"] = spelling(conf, found["url_name"])
    return Settings(**found)


def _store(conf: Any, own_url: str | None) -> tuple[str, str, Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the setting that names the store, its URL, and Celery's transport and certificate options for it."""
    broker_options = conf.get("broker_transport_options") or {}
    result_options = conf.get("result_backend_transport_options") or {}
    broker_tls, result_tls = _certificates(conf.get("broker_use_ssl")), _certificates(conf.get("redis_backend_use_ssl"))
    if own_url is not None:
        scheme = scheme_of(own_url)
        is_by_sentinel = scheme in SENTINEL_SCHEMES
        options = {**broker_options, **result_options, "global_keyprefix": None} if is_by_sentinel else {}
        tls = broker_tls if result_tls is None else result_tls
        return (
            "singleton_lock_url",
            own_url,
            options,
            tls if is_by_sentinel or scheme in ("rediss", "valkeys") else None,
        )
    broker = _broker(conf)
    if broker is not None:
        return "broker_url", broker, broker_options, broker_tls
    if scheme_of(conf.result_backend) in STORE_SCHEMES:
        provider = conf.get("redis_backend_credential_provider")
        return "result_backend", conf.result_backend, {**result_options, "credential_provider": provider}, result_tls
    name = spelling(conf, "singleton_lock_url")
    raise ConfigurationError(f"no store for locks: set {name} (neither broker nor result backend is Redis)")


def _broker(conf: Any) -> str | None:
    """Return the broker's URL if the broker is one Redis, or several Sentinels of one."""
    given = [url for url in (conf.broker_url, conf.broker_read_url, conf.broker_write_url) if url]
    urls = {";".join(url) if isinstance(url, (list, tuple)) else str(url) for url in given}
    if not any(scheme_of(url) in STORE_SCHEMES for url in urls):
        return None
    (url, *others) = urls
    if others or (";" in url and scheme_of(url) != "sentinel"):
        name = spelling(conf, "singleton_lock_url")
        raise ConfigurationError(f"the broker has several URLs: set {name} to the one store of locks")
    return url


def _certificates(use_ssl: Any) -> Mapping[str, Any] | None:
    """Return the Redis certificate options of one of Celery's ``…_use_ssl`` settings; True means the defaults."""
    if isinstance(use_ssl, Mapping):
        return {name: option for name, option in use_ssl.items() if name.startswith("ssl_")}
    return {} if use_ssl else None
