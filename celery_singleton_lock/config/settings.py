"""The settings of an app: which store keeps its locks, and how the store is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_singleton_lock.config.foreign import refuse_unknown_settings
from celery_singleton_lock.config.options import APP_SETTINGS, STORE_SCHEMES, Settings, scheme_of
from celery_singleton_lock.errors import ConfigurationError


def settings_of(conf: Any) -> Settings:
    """Read the settings of an app from its configuration.

    Raises:
        ConfigurationError: a value cannot be used, a setting is unknown, or there is no store.
    """
    refuse_unknown_settings(conf)
    found = {name: setting.checked(conf.get(name), name) for name, setting in APP_SETTINGS.items()}
    found = {name.removeprefix("singleton_lock_"): value for name, value in found.items()}
    found["url"], options, found["tls"] = _store(conf, found["url"])
    prefix = f"{options.get('global_keyprefix') or ''}{found['prefix']}"
    found["prefix"] = APP_SETTINGS["singleton_lock_prefix"].checked(
        prefix, "singleton_lock_prefix after global_keyprefix"
    )
    return Settings(**found, options=options)


def _store(conf: Any, own_url: str | None) -> tuple[str, Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the URL of the store, with the transport and certificate options that Celery's settings hold for it."""
    broker_options = conf.get("broker_transport_options") or {}
    result_options = conf.get("result_backend_transport_options") or {}
    broker_tls, result_tls = _certificates(conf.get("broker_use_ssl")), _certificates(conf.get("redis_backend_use_ssl"))
    if own_url is not None:
        scheme = scheme_of(own_url)
        options = {**broker_options, **result_options, "global_keyprefix": None} if scheme == "sentinel" else {}
        tls = broker_tls if result_tls is None else result_tls
        return own_url, options, tls if scheme in ("rediss", "valkeys", "sentinel") else None
    broker = _broker(conf)
    if broker is not None:
        return broker, broker_options, broker_tls
    if scheme_of(conf.result_backend) in STORE_SCHEMES:
        provider = conf.get("redis_backend_credential_provider")
        return conf.result_backend, {**result_options, "credential_provider": provider}, result_tls
    raise ConfigurationError("no store for locks: set singleton_lock_url (neither broker nor result backend is Redis)")


def _broker(conf: Any) -> str | None:
    """Return the broker's URL if the broker is one Redis, or several Sentinels of one."""
    given = [url for url in (conf.broker_url, conf.broker_read_url, conf.broker_write_url) if url]
    urls = {";".join(url) if isinstance(url, (list, tuple)) else str(url) for url in given}
    if not any(scheme_of(url) in STORE_SCHEMES for url in urls):
        return None
    (url, *others) = urls
    if others or (";" in url and scheme_of(url) != "sentinel"):
        raise ConfigurationError("the broker has several URLs: set singleton_lock_url to the one store of locks")
    return url


def _certificates(use_ssl: Any) -> Mapping[str, Any] | None:
    """Return the Redis certificate options of one of Celery's ``…_use_ssl`` settings; True means the defaults."""
    if isinstance(use_ssl, Mapping):
        return {name: option for name, option in use_ssl.items() if name.startswith("ssl_")}
    return {} if use_ssl else None
