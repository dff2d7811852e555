"""Leases in Redis or Valkey: one script call for each verb, under one deadline.

Connections of redis-py are used below its client, which would send a command again on its own and wait between tries. A command
that met a connection closed by the server is sent once more, on a fresh one, within the same deadline: every verb can bear that,
but for `free`, which may so meet whoever came in between.
"""

from __future__ import annotations

import math
import re
import ssl
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha1
from itertools import islice
from pkgutil import get_data, resolve_name
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import __version__, exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from celery_singleton_lock.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.protocol import COMPLETED_TTL, AcquireResult, AcquireStatus, LeaseRequest, RenewResult

_PERMANENT = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
#: Error replies of a server that is there but cannot serve now. redis-py has classes for some, and takes the code out of their
#: text; in scripts, older servers wrap the code in a text of their own.
_TRANSIENT = tuple(
    getattr(exceptions, name)
    for name in ("ReadOnlyError", "OutOfMemoryError", "MasterDownError", "ClusterDownError", "TryAgainError")
    if hasattr(exceptions, name)
)
_TRANSIENT_CODES = (
    "READONLY",
    "OOM ",
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY ",
    "NOREPLICAS",
    "MISCONF",
)
#: How servers say that they refuse a login, or commands without one; a stranger's command may have few and short words only.
_LOGIN = re.compile(
    r"AuthenticationError|NOAUTH|WRONGPASS|Authentication required"
    r"|unauthenticated (multi)?bulk length|invalid (username-)?password",
    re.IGNORECASE,
)
LOOK = 0.05  # seconds between looks for a free connection, should an exception have kept the bell from ringing
GRACE = 0.05  # seconds for sending, and again for the reply, of a call whose thread was kept from running
_VERIFY = {"CERT_REQUIRED": "required", "CERT_OPTIONAL": "optional", "CERT_NONE": "none"}


_RESP2 = {"protocol": 2} if int(__version__.split(".")[0]) >= 5 else {}  # redis-py 4 knows no other
_parse_url: Any = parse_url  # untyped in redis-py, as the next two
_Sentinel: Any = Sentinel
_SentinelPool: Any = SentinelConnectionPool


class _Script:
    """A Lua file and its digest.

    Arguments:
        name: of the file.
        keys: how many it takes; renewal takes them once for each lease.
    """

    def __init__(self, name: str, keys: int) -> None:
        text: Any = get_data(__package__, f"{name}.lua")
        self.text = str(text, "utf-8")
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        self.keys = keys


_SCRIPTS = {
    "acquire": _Script("acquire", 5),
    "renew": _Script("renew", 2),
    "reacquire": _Script("reacquire", 4),
    "release": _Script("release", 3),
    "holder": _Script("holder", 1),
    "revoke": _Script("revoke", 3),
}


class _Words:
    """The words of a command. Error trackers that keep the variables of frames show its mute repr, and not the token.

    All are texts: hiredis 3.5 crashes if a signal handler raises while it packs a number.
    """

    __slots__ = ("texts",)

    def __init__(self, *words: str) -> None:
        self.texts = words

    def after(self, *words: str) -> _Words:
        """Return these words with others before them."""
        return _Words(*words, *self.texts)


_RENEWED = {answer.value: answer for answer in RenewResult}


class _Socket:
    """A socket whose operations all share their connection's deadline."""

    def __init__(self, sock: Any, connection: Any) -> None:
        self._sock = sock
        self._connection = connection
        self._timeout = math.inf  # what the socket's was set to last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, *args: Any) -> Any:
        return self._bounded(self._connection.deadline).recv(*args)

    def recv_into(self, buffer: Any) -> int:
        return int(self._bounded(self._connection.deadline).recv_into(buffer))

    def sendall(self, *args: Any) -> Any:
        return self._bounded(self._connection.deadline).sendall(*args)

    def settimeout(self, seconds: float | None) -> None:
        """By redis-py."""
        self._timeout = math.inf
        self._sock.settimeout(seconds)

    def _bounded(self, deadline: float) -> Any:
        """The socket, with a timeout that is not a millisecond from right: to set it takes a system call."""
        left = _left(deadline)
        if not -0.001 < self._timeout - left < 0.001:
            self._sock.settimeout(left)
            self._timeout = left
        return self._sock


class _Deadline:
    """Mixin for redis-py connections: connect, handshake, commands and replies end by `deadline`."""

    deadline = 0.0

    @property
    def socket_timeout(self) -> float:
        """Seconds left. redis-py asks for each address of a host, and once more before the handshake."""
        return _left(self.deadline)

    @socket_timeout.setter
    def socket_timeout(self, value: object) -> None:
        """The deadline counts, and nothing that redis-py sets."""

    socket_connect_timeout = socket_timeout

    def _connect(self) -> Any:
        return _Socket(super()._connect(), self)  # type: ignore[misc]


class RedisStore:
    """The `LockStore` verbs on a Redis or Valkey server.

    Arguments:
        connect: makes a connection, not yet connected (see `connector`).
        timeout: seconds for a whole call.
        limit: how many connections there are at most.
    """

    def __init__(self, connect: Callable[[], Any], timeout: float = 1.0, limit: int = 1) -> None:
        self._connect = connect
        self._timeout = timeout
        self._free = [_Slot() for _ in range(limit)]  # the one used last is used next: few connections are made
        self._gate, self._bell = allocate_lock(), allocate_lock()
        self._bell.acquire()  # it rings by being released

    def acquire(self, claim: LeaseRequest, timeout: float | None = None) -> AcquireResult:
        words = _Words(
            claim.lock,
            claim.attempt,
            claim.ended,
            claim.fence,
            claim.recent,
            *_held_by(claim),
            "1" if claim.redelivered else "",
        )
        reply = self._run("acquire", words, timeout)
        answer, *more = reply
        if answer == "granted":
            return AcquireResult(AcquireStatus.GRANTED, fence=int(more[0]))
        return AcquireResult(AcquireStatus(answer), _holder(more) if more else None)

    def renew(self, claims: Sequence[LeaseRequest], timeout: float | None = None) -> list[RenewResult]:
        return [_RENEWED[answer] for answer in self._run("renew", _renewal_of(claims), timeout, len(claims))]

    def reacquire(self, claim: LeaseRequest, fence: int, timeout: float | None = None) -> tuple[RenewResult, bool]:
        words = _Words(claim.lock, claim.attempt, claim.fence, claim.recent, *_held_by(claim), str(fence))
        answer, taken = self._run("reacquire", words, timeout)
        return _RENEWED[answer], bool(taken)

    def release(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> bool:
        words = _Words(_lock_of(claim), claim.attempt, claim.ended, claim.token, _ms(claim.ttl), "1" if success else "")
        return bool(self._run("release", words, timeout))

    def record_outcome(self, claim: LeaseRequest, success: bool, timeout: float | None = None) -> None:
        if success:
            self._command("SET", claim.ended, "success", "PX", _ms(COMPLETED_TTL), timeout=timeout)
        else:
            self._command("DEL", claim.ended, timeout=timeout)

    def holder(self, lock: str) -> Holder | None:
        reply = self._run("holder", _Words(lock))
        return _holder(reply) if reply else None

    def revoke(self, base: str, lock: str) -> Holder | None:
        reply = self._run("revoke", _Words(lock, f"{base}:fence", f"{base}:recent", f"{base}:attempt:"))
        return _holder(reply) if reply else None

    def eviction_policy(self) -> str:
        info = str(self._command("INFO", "memory"))
        return next((line[17:].strip() for line in info.splitlines() if line.startswith("maxmemory_policy:")), "")

    def clone(self, limit: int) -> RedisStore:
        return RedisStore(self._connect, self._timeout, limit)

    def close(self) -> None:
        with self._gate:
            for slot in self._free:
                slot.drop()

    def _run(self, name: str, words: _Words, timeout: float | None = None, times: int = 1) -> Any:
        script, deadline = _SCRIPTS[name], self._deadline(timeout)
        try:
            return self._call(words.after("EVALSHA", script.sha, str(script.keys * times)), deadline)
        except exceptions.NoScriptError:
            return self._call(words.after("EVAL", script.text, str(script.keys * times)), deadline)

    def _command(self, *words: str, timeout: float | None = None) -> Any:
        return self._call(_Words(*words), self._deadline(timeout))

    def _deadline(self, timeout: float | None = None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else min(timeout, self._timeout))

    def _call(self, command: _Words, deadline: float) -> Any:
        held: list[_Slot] = []
        try:
            if not self._gate.locked():  # nobody waits for a slot
                self._take(held)
            if not held:
                self._wait_for_slot(held, deadline)
            return self._talk(held[0], command, deadline)
        except exceptions.NoScriptError:
            raise
        except (exceptions.RedisError, OSError) as error:
            raise _told(error) from _bare(error)
        finally:
            if held:
                self._free.append(held[0])  # with no call of Python code before, in which an exception could strike
                if self._bell.locked():  # else it has rung already, and nobody heard it
                    self._ring()

    def _wait_for_slot(self, held: list[_Slot], deadline: float) -> None:
        """Move a slot into this list, once one is free; of several threads that wait, those behind the first wait at the gate.

        Of C locks alone: the queues of Python 3.12 and before may wait past their timeout after a signal, or when another thread
        was quicker, and those in Python code are left locked by an exception of a signal handler.
        """
        at_gate: list[bool] = []
        try:
            at_gate.extend(islice(iter(partial(self._gate.acquire, True, _left(deadline)), False), 1))
            while at_gate:
                self._take(held)
                if held or time.monotonic() >= deadline:
                    break
                self._bell.acquire(True, min(_left(deadline), LOOK))
        finally:
            if at_gate:
                self._gate.release()
        if not held:
            raise TimeoutError("no connection to the store was free in time")

    def _take(self, held: list[_Slot]) -> None:
        """Move a slot into this list if one is free. All in C: no exception of a signal handler comes between."""
        try:  # noqa: SIM105 - a context manager takes longer
            held.extend(islice(iter(self._free.pop, None), 1))
        except IndexError:
            pass

    def _ring(self) -> None:
        with suppress(RuntimeError):  # another thread was quicker
            self._bell.release()

    def _talk(self, slot: _Slot, command: _Words, deadline: float) -> Any:
        """Send a command and read its reply; the slot stays dirty unless the reply was read to its end."""
        if slot.dirty:
            slot.drop()
        slot.dirty = True
        if slot.connection is None:
            slot.connection = self._connect()
        slot.connection.deadline = deadline
        try:
            reply = _reply(slot.connection, command, deadline)
        except exceptions.ResponseError as error:
            slot.dirty = isinstance(error, exceptions.ReadOnlyError)  # look for the new master then
            raise
        slot.dirty = False
        return reply


class _Slot:
    """Room for one connection. It is dirty while a command is under way, and after one that was broken off."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.dirty = False

    def drop(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.disconnect()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    return left if left > 0.001 else 0.001


def _told(error: Exception) -> StoreError:
    """What is raised for an error of redis-py or of a socket: a refusal, or an outage."""
    whole = str(error)
    # Servers repeat a command's words, passwords and tokens too; redis-py shows how each Sentinel was asked, by all its options.
    text = whole.partition(" : <" if isinstance(error, MasterNotFoundError) else ", with args beginning with")[0][:300]
    if isinstance(error, exceptions.AuthenticationError) or _LOGIN.search(whole):
        return StoreError(f"the store refused the login, wrong or missing password: {text}")
    if isinstance(error, (*_PERMANENT, exceptions.ResponseError)):
        passing = isinstance(error, _TRANSIENT) or any(word in text for word in _TRANSIENT_CODES)
        return (StoreUnavailable if passing else StoreError)(f"the store refused: {text}")
    return StoreUnavailable(f"the store could not be reached: {text}")


def _bare(error: Exception) -> Exception:
    """An error without the frames of redis-py, in whose variables error trackers would find passwords."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _reply(connection: Any, command: _Words, deadline: float) -> Any:
    """What the server answers. A command that met a closed connection is sent once more.

    Sending and reading have `GRACE` at least: a body that keeps the GIL may have eaten all the time there was.
    """
    for once_more in (True, False):
        if connection._sock is None:
            connection.connect()
        try:
            connection.deadline = max(deadline, time.monotonic() + GRACE)
            connection.send_packed_command(connection.pack_command(*command.texts), check_health=False)
            connection.deadline = max(deadline, time.monotonic() + GRACE)
            return connection.read_response()
        except (*_PERMANENT, exceptions.TimeoutError, TimeoutError):
            raise
        except (exceptions.ConnectionError, OSError):  # closed by the server, most likely since it was used last
            connection.disconnect()
            if not once_more:
                raise
            connection.deadline = deadline


def _lock_of(claim: LeaseRequest) -> str:
    """The lock, or the attempt where only that is known."""
    return claim.lock if claim.digest else claim.attempt


def _renewal_of(claims: Sequence[LeaseRequest]) -> _Words:
    """The words of a renewal: all keys, then all tokens and TTLs."""
    keys: list[str] = []
    owners: list[str] = []
    for claim in claims:
        attempt = claim.attempt
        keys += (claim.lock if claim.digest else attempt, attempt)
        owners += (claim.token, _ms(claim.ttl))
    return _Words(*keys, *owners)


def _held_by(claim: LeaseRequest) -> tuple[str, ...]:
    """The words that make a claim the holder."""
    return claim.token, _ms(claim.ttl), str(claim.task_id), claim.node, str(claim.pid), "1" if claim.supervised else ""


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


def _holder(reply: Sequence[Any]) -> Holder:
    task_id, node, pid, age, remaining, fence = reply
    return Holder(task_id, node, int(pid), max(0, age) / 1000, max(0, remaining) / 1000, int(fence or 0))


def connector(
    url: str, options: Mapping[str, Any], tls: Mapping[str, Any] | None = None, timeout: float = 1.0
) -> Callable[[], Any]:
    """A function that makes connections to the server that a URL names, as Celery spells URLs.

    Arguments:
        url: ``redis://``, ``rediss://``, ``redis+socket://`` or ``sentinel://`` (several, separated by semicolons);
            ``valkey://`` and ``valkeys://`` are ``redis://`` and ``rediss://``.
        options: Celery's transport options; `master_name`, `sentinel_kwargs`, `username`, `password` and
            `credential_provider` are used.
        tls: certificate options as in Celery's `redis_backend_use_ssl`.
        timeout: seconds in which all Sentinels together must tell which server it is.

    Raises:
        ConfigurationError: the URL or the options do not name a server, or name a credential provider that is none.
    """
    try:
        return _connector(url, options, tls, timeout)
    except ConfigurationError:
        raise
    except TypeError as error:  # an option that redis-py does not know
        raise ConfigurationError(f"singleton_lock_url: {error}") from None
    except (ValueError, exceptions.RedisError):  # whose text may show a part of a password
        raise ConfigurationError("singleton_lock_url cannot be read; are special characters percent-encoded?") from None


def _connector(
    url: str, options: Mapping[str, Any], tls: Mapping[str, Any] | None, timeout: float
) -> Callable[[], Any]:
    text = {"decode_responses": True, "encoding_errors": "backslashreplace"}  # a task id may be any text
    wanted: dict[str, Any] = {**text, "retry": Retry(NoBackoff(), 0), **_RESP2}
    wanted.update({name: options[name] for name in ("username", "password") if options.get(name)})
    url = _as_redis_py_spells(url)
    scheme = urlsplit(url).scheme
    if scheme == "sentinel":
        return _sentinel(url, options, tls, timeout, wanted)
    if scheme != "unix" and not re.fullmatch(r"/*\d*", urlsplit(url).path):  # redis-py would take another one for 0
        raise ConfigurationError("singleton_lock_url: the path must be the number of a database")
    found = dict(_parse_url(url))
    provider = found.pop("credential_provider", None) or options.get("credential_provider")
    for name in ("connection_class", "socket_timeout", "socket_connect_timeout", "retry_on_timeout", "max_connections"):
        found.pop(name, None)  # ours are used
    base: Any = UnixDomainSocketConnection if "path" in found else Connection
    if scheme == "rediss" or tls:
        base = SSLConnection
        found = _host_checked({**_tls(tls or {}), **_tls(found)})
    return _maker(base, _login({**wanted, **found}, provider))


def _login(options: dict[str, Any], provider: Any) -> dict[str, Any]:
    """Options with a credential provider, if one is given, instead of user and password, as Celery (5.7) has it."""
    if not provider:
        return options
    rest = {name: value for name, value in options.items() if name not in ("username", "password")}
    return {**rest, "credential_provider": _Provider(_provider(provider))}


def _provider(given: Any) -> Any:
    """A credential provider, or what the dotted name of one makes.

    Raises:
        ConfigurationError: it is none.
    """
    made = given
    if isinstance(given, str):
        try:
            made = resolve_name(given)()
        except Exception as error:
            detail = (
                f": {error}" if isinstance(error, (ImportError, AttributeError)) else ""
            )  # others may tell a secret
            raise ConfigurationError(
                f"singleton_lock_url: credential_provider={given} cannot be used ({type(error).__name__}{detail})"
            ) from error
    if not isinstance(made, CredentialProvider):
        source = given if isinstance(given, str) else type(given).__name__
        raise ConfigurationError(
            f"singleton_lock_url: credential_provider={source} must be a redis.CredentialProvider or make one"
        )
    return made


class _Provider(CredentialProvider):
    """A user's credential provider, whose errors count as the store's."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            name = type(self._provider).__name__
            raise exceptions.ConnectionError(
                f"the credential provider {name} failed: {type(error).__name__}"
            ) from error


def _maker(base: Any, options: dict[str, Any]) -> Callable[[], Any]:
    kind = type(f"Bounded{base.__name__}", (_Deadline, base), {})
    kind(**options)  # refuses what it does not know
    return lambda: kind(**options)


def _as_redis_py_spells(url: str) -> str:
    """Celery's `redis+socket:///path?virtual_host=1` is redis-py's `unix:///path?db=1`."""
    url = re.sub("^valkey(s?)://", r"redis\1://", url)
    url = url.replace("redis+socket://", "unix://", 1)
    return url.replace("virtual_host=", "db=") if url.startswith("unix://") else url


def _tls(options: Mapping[str, Any]) -> dict[str, Any]:
    """Certificate options as redis-py takes them; the server's certificate is checked unless they say otherwise."""
    found = dict(options)
    wanted = found.get("ssl_cert_reqs")
    if wanted is not None:
        found["ssl_cert_reqs"] = _VERIFY.get(wanted, wanted) if isinstance(wanted, str) else ssl.VerifyMode(wanted)
    return found


def _host_checked(options: dict[str, Any]) -> dict[str, Any]:
    """With the server's name checked where its certificate is: redis-py before 6 does not unless it is told."""
    unchecked = options.get("ssl_cert_reqs") in ("none", ssl.CERT_NONE)
    return {"ssl_check_hostname": not unchecked, **options}


def _sentinel(
    url: str, options: Mapping[str, Any], tls: Any, timeout: float, wanted: dict[str, Any]
) -> Callable[[], Any]:
    if not options.get("master_name"):
        raise ConfigurationError(
            "singleton_lock_url: a sentinel:// URL needs master_name in Celery's transport options"
        )
    parts = [urlsplit(part) for part in url.split(";")]
    last = parts[-1]
    wanted |= {"db": int(last.path.strip("/") or 0)}
    wanted |= {name: unquote(value) for name in ("username", "password") if (value := getattr(last, name))}
    provider = parse_qs(last.query).get("credential_provider", [options.get("credential_provider")])[-1]
    share = timeout / len(parts) / 2  # they are asked in turn, each by a connection and a command
    bounds = {"socket_timeout": share, "socket_connect_timeout": share, "retry": Retry(NoBackoff(), 0)}
    asked = {**bounds, **(options.get("sentinel_kwargs") or {})}
    sentinel = _Sentinel([(part.hostname, part.port or 26379) for part in parts], sentinel_kwargs=asked)
    base: Any = SentinelManagedSSLConnection if tls else SentinelManagedConnection
    kind = type(f"Bounded{base.__name__}", (_Deadline, base), {})
    pool = _SentinelPool(
        options["master_name"],
        sentinel,
        ssl=bool(tls),
        connection_class=kind,
        **_login({**wanted, **(_host_checked(_tls(tls)) if tls else {})}, provider),
    )
    make: Callable[[], Any] = pool.make_connection
    return make
