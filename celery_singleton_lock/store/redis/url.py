"""From a URL as Celery spells it, and Celery's options, to a function that makes connections."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import __version__
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.store.redis.connection import with_deadline

_RESP2 = {"protocol": 2} if int(__version__.split(".")[0]) >= 5 else {}  # redis-py 4 knows no other
#: Options of redis-py in a URL that the store decides itself. It always speaks RESP2.
_OWN_OPTIONS = {
    "connection_class", "decode_responses", "encoding", "encoding_errors", "health_check_interval", "legacy_responses",
    "max_connections", "protocol", "retry_on_error", "retry_on_timeout", "socket_connect_timeout", "socket_timeout", "timeout",
}  # fmt: skip
#: Options that a URL may have. An older redis-py may not know all of them.
_TLS_OPTIONS = {
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers",
    "ssl_exclude_verify_flags", "ssl_include_verify_flags", "ssl_keyfile", "ssl_min_version", "ssl_password",
}  # fmt: skip
_OPTIONS = {
    *_TLS_OPTIONS, "client_name", "credential_provider", "db", "host", "lib_name", "lib_version", "password", "path", "port",
    "socket_keepalive", "socket_read_size", "username",
}  # fmt: skip
#: Options of a URL that are whole numbers. Older versions of redis-py leave some of them text.
_NUMBERS = ("db", "protocol", "socket_read_size")
_HINT = "in a user name or password, # ? / : @ must be percent-encoded: %23 %3F %2F %3A %40"

_parse_url: Any = parse_url  # untyped in redis-py, as the next two
_Sentinel: Any = Sentinel
_SentinelPool: Any = SentinelConnectionPool


def connector(
    url: str, options: Mapping[str, Any], tls: Mapping[str, Any] | None = None, timeout: float = 1.0
) -> Callable[[], Any]:
    """Return a function that makes connections, not yet connected, to the server that a URL names.

    Arguments:
        options: Celery's transport options; used are `master_name` (unless the URL has it), `sentinel_kwargs`, `username`,
            `password` and `credential_provider`.
        tls: certificate options as in Celery's `redis_backend_use_ssl`.
        timeout: seconds in which all Sentinels together must tell which server it is.

    Raises:
        ConfigurationError: the URL or the options do not name a server, or name something that is no credential provider.
    """
    make = _by_sentinel if url.startswith(("sentinel:", "redis+sentinel:")) else _direct
    texts = {"decode_responses": True, "encoding_errors": "backslashreplace"}  # a task id may be any text
    login = {name: options[name] for name in ("username", "password") if options.get(name)}
    try:
        return make(url, options, tls, timeout, {**texts, "retry": Retry(NoBackoff(), 0), **_RESP2, **login})
    except ConfigurationError:
        raise
    except TypeError as error:  # an option that redis-py does not know
        raise ConfigurationError(f"singleton_lock_url: {error}") from None
    except (ValueError, RedisError) as error:  # whose text may show a part of a password
        said = str(error) if re.fullmatch(r"Invalid value for '\w+' in connection URL\.", str(error)) else _HINT
        raise ConfigurationError(f"singleton_lock_url cannot be read: {said}") from None


def _direct(url: str, options: Mapping[str, Any], tls: Any, timeout: float, spec: dict[str, Any]) -> Callable[[], Any]:
    url = re.sub("^valkey(s?)://", r"redis\1://", url)
    if url.startswith("redis+socket://"):  # Celery's spelling of redis-py's unix:///path?db=1
        url = url.replace("redis+socket", "unix", 1).replace("virtual_host=", "db=")
    else:
        _refuse_unquoted(url)
    numbers = _numbers(url)
    found = {name: value for name, value in {**_parse_url(url), **numbers}.items() if name not in _OWN_OPTIONS}
    has_tls = url.startswith("rediss:") or bool(tls)
    for name in found:
        if name not in _OPTIONS or (name in _TLS_OPTIONS and not has_tls):
            why = "needs rediss://" if name in _TLS_OPTIONS else "cannot be used"
            raise ConfigurationError(f"singleton_lock_url: the option {name} {why}")
    provider = found.pop("credential_provider", None) or options.get("credential_provider")
    kind: Any = UnixDomainSocketConnection if "path" in found else Connection
    if has_tls:
        kind, found = SSLConnection, _with_tls({**(tls or {}), **found})
    kind, spec = with_deadline(kind), _with_credentials({**spec, **found}, provider)
    kind(**spec)  # raises TypeError for an option that it does not know
    return lambda: kind(**spec)


def _numbers(url: str) -> dict[str, int]:
    """Return the options of a URL's query that are whole numbers.

    Raises:
        ConfigurationError: the value of one of them is none.
    """
    given = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items() if name in _NUMBERS}
    for name, value in given.items():
        if not re.fullmatch(r"\d+", value):
            raise ConfigurationError(f"singleton_lock_url: the value of the option {name} must be a whole number")
    return {name: int(value) for name, value in given.items()}


def _refuse_unquoted(url: str) -> None:
    """Refuse a URL whose host ends too early, as by a # in the password: it would name another server, or another database.

    Raises:
        ConfigurationError: the URL shows that.
    """
    parts = urlsplit(url)
    if parts.fragment or any("@" in field and "=" not in field for field in (parts.path, *parts.query.split("&"))):
        raise ConfigurationError(f"singleton_lock_url names no host after its login: {_HINT}")
    if not re.fullmatch(r"/*\d*", parts.path):  # redis-py would use database 0
        raise ConfigurationError("singleton_lock_url: the path must be the number of a database")


def _by_sentinel(
    url: str, options: Mapping[str, Any], tls: Any, timeout: float, spec: dict[str, Any]
) -> Callable[[], Any]:
    parts = [urlsplit(part) for part in _as_celery_spells(url).split(";")]
    last = parts[-1]
    query = parse_qs(last.query)
    name = query.get("master_name", [options.get("master_name")])[-1]
    if not name:
        raise ConfigurationError(
            "singleton_lock_url: a sentinel:// URL needs ?master_name=…, or master_name in Celery's transport options"
        )
    spec |= {"db": int(last.path.strip("/") or 0)}
    spec |= {name: unquote(value) for name in ("username", "password") if (value := getattr(last, name))}
    provider = query.get("credential_provider", [options.get("credential_provider")])[-1]
    share = timeout / len(parts) / 2  # they are asked in turn, each by a connection and a command
    bounds = {"socket_timeout": share, "socket_connect_timeout": share, "retry": Retry(NoBackoff(), 0)}
    addresses = [(part.hostname, part.port or 26379) for part in parts]
    sentinel = _Sentinel(addresses, sentinel_kwargs={**bounds, **(options.get("sentinel_kwargs") or {})})
    kind = with_deadline(SentinelManagedSSLConnection if tls else SentinelManagedConnection)
    spec = _with_credentials({**spec, **(_with_tls(tls) if tls else {})}, provider)
    pool = _SentinelPool(name, sentinel, ssl=bool(tls), connection_class=kind, **spec)
    make: Callable[[], Any] = pool.make_connection
    return make


def _as_celery_spells(url: str) -> str:
    """Return a URL with each Sentinel as a URL of its own, separated by ``;``, and the login of the server in the last one.

    Raises:
        ConfigurationError: it begins with ``redis+sentinel:`` and does not go on as it has to.
    """
    if url.startswith("sentinel:"):
        return url
    found = re.fullmatch(
        r"redis\+sentinel://(?P<login>.*@)?(?P<hosts>[^/@?]+)/(?P<name>[^/?]+)(/(?P<db>\d*))?(\?(?P<query>.*))?", url
    )
    if found is None:
        raise ConfigurationError(
            "singleton_lock_url must be as redis+sentinel://host:port,host:port/name/db, with the primary's name"
        )
    *others, last = found["hosts"].split(",")
    query = f"{found['query'] or ''}&master_name={found['name']}"
    return ";".join(
        [
            *(f"sentinel://{one}" for one in others),
            f"sentinel://{found['login'] or ''}{last}/{found['db'] or 0}?{query}",
        ]
    )


def _with_tls(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with those of certificates as redis-py takes them.

    The server's certificate is checked unless they say otherwise, and then its name: redis-py before 6 does that on demand only.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    for file in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        if options.get(file) and not os.access(options[file], os.R_OK):
            raise ConfigurationError(f"singleton_lock_url: {file}={options[file]} cannot be read")
    check = options.get("ssl_cert_reqs")
    name = check if isinstance(check, str) else ssl.VerifyMode(ssl.CERT_REQUIRED if check is None else check).name
    check = name.removeprefix("CERT_").lower()
    return {"ssl_check_hostname": check != "none", **options, "ssl_cert_reqs": check}


def _with_credentials(options: dict[str, Any], provider: Any) -> dict[str, Any]:
    """Return options with a provider, or what its dotted name makes, instead of user and password, as Celery (5.7) does it.

    Raises:
        ConfigurationError: it is no credential provider.
    """
    if not provider:
        return options
    others = {name: value for name, value in options.items() if name not in ("username", "password")}
    return {**others, "credential_provider": _Provider(_made(provider))}


def _made(provider: Any) -> CredentialProvider:
    made, named = provider, f"singleton_lock_url: credential_provider={type(provider).__name__}"
    if isinstance(provider, str):
        named = f"singleton_lock_url: credential_provider={provider}"
        try:
            made = resolve_name(provider)()
        except Exception as error:
            harmless = isinstance(error, (ImportError, AttributeError))  # the texts of others may contain a secret
            why = f"{type(error).__name__}: {error}" if harmless else type(error).__name__
            raise ConfigurationError(f"{named} cannot be used ({why})") from error
    if not isinstance(made, CredentialProvider):
        raise ConfigurationError(f"{named} must be a redis.CredentialProvider or make one")
    return made


class _Provider(CredentialProvider):
    """A user's provider, whose errors count as an outage and show no secret."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            name = type(self._provider).__name__
            raise ConnectionError(f"the credential provider {name} failed: {type(error).__name__}") from error
