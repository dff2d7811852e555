"""Errors of a store show no token to error trackers, which record the variables of an exception's frames."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import SingletonTask, StoreError, StoreUnavailable
from celery_singleton_lock.store.protocol import LockStore
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import MakeStore, start_with_tls
from tests.contract.test_redis import CALLS, every_call
from tests.servers import RedisServer, until

TIMEOUT = 0.15
TOKEN, WRONG = "70ken-0f-this-attempt", "pa55w0rd"
StartServer = Callable[..., RedisServer]
Call = Callable[[Any, LeaseSpec], Any]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all its causes and contexts, suppressed ones included."""
    if error is not None:
        yield error
        yield from chain(error.__cause__)
        yield from chain(error.__context__)


def frames(trace: TracebackType | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_name, trace.tb_frame.f_locals
        trace = trace.tb_next


def shown(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield what trackers record of a value: texts, the contents of containers, the repr of other objects."""
    yield f"{value!r} {value}"
    if isinstance(value, (bytes, bytearray, memoryview)):
        yield bytes(value).decode(errors="replace")
    elif depth and isinstance(value, Mapping):
        for name, one in value.items():
            yield from shown(name, depth - 1)
            yield from shown(one, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from shown(one, depth - 1)


def leaks(raised: BaseException, *secrets: str) -> list[str]:
    """Return the names of variables in frames below this module, and of errors, that show a secret."""
    found = []
    for error in chain(raised):
        texts = {"the error": [f"{error!r} {error} {error.args!r}", *traceback.format_exception(error)]}
        for name, variables in frames(error.__traceback__):
            texts |= {f"{variable} in {name}": list(shown(value)) for variable, value in variables.items()}
        found += [place for place, values in texts.items() if any(s in value for s in secrets for value in values)]
    return found


@pytest.fixture
def one(base: str) -> LeaseSpec:
    return LeaseSpec(base, "d", TOKEN, 30.0, "id", "w1@host", 4711, supervised=True)


def shows_nothing(call: Call, store: RedisStore, lease_request: LeaseSpec) -> None:
    """Check that the call fails twice and that neither error shows the token; the second call has packed commands."""
    for _ in range(2):
        with pytest.raises(StoreError) as raised:
            call(store, lease_request)
        assert [] == leaks(raised.value, TOKEN)


def test_leaks_are_found() -> None:
    """`leaks` finds a secret in variables, in containers, in causes and in texts."""

    def fail(words: Any, cause: Exception | None = None) -> Exception:
        try:
            raise ValueError from cause
        except ValueError as error:
            return error

    for words in (TOKEN, TOKEN.encode(), [{"a": (TOKEN.encode(),)}], bytearray(TOKEN.encode())):
        assert ["words in fail"] == leaks(fail(words), TOKEN)
        inner = fail(words)
        assert leaks(fail(None, inner), TOKEN)
    assert ["the error"] == leaks(ValueError(TOKEN), TOKEN)
    assert [] == leaks(fail("harmless"), TOKEN)


def is_answered(call: Call, store: LockStore, one: LeaseSpec) -> bool:
    """Call a store whose timeout is short; tell whether it has answered in time."""
    with suppress(StoreUnavailable):
        call(store, one)
        return True
    return False


@every_call
def test_server_away(own_server: StartServer, redis_store: MakeStore, one: LeaseSpec, call: Call) -> None:
    """The error of a stopped server shows no token, on an open connection or a new one."""
    server = own_server()
    store = redis_store(server.url())
    call(store, one)
    server.stop()
    shows_nothing(call, store, one)
    shows_nothing(call, redis_store(server.url()), one)


@every_call
def test_server_paused(own_server: StartServer, redis_store: MakeStore, one: LeaseSpec, call: Call) -> None:
    """The error of a timeout shows no token, on an open connection or a new one."""
    server = own_server()
    store = redis_store(server.url(), TIMEOUT)
    until(lambda: is_answered(call, store, one), "a call on the connection that stays open")
    server.pause()
    try:
        shows_nothing(call, store, one)
        shows_nothing(call, redis_store(server.url(), TIMEOUT), one)
    finally:
        server.resume()


@every_call
def test_server_refuses(own_server: StartServer, redis_store: MakeStore, one: LeaseSpec, call: Call) -> None:
    """The error of a refused command shows no token, also if the server quotes the command."""
    server = own_server()
    admin = redis_store(server.url())
    admin.command("ACL", "SETUSER", "nobody", "on", ">pw", "~*", "-@all")
    shows_nothing(call, redis_store(server.url().replace("redis://", "redis://nobody:pw@")), one)
    renamed = [
        word
        for name in ("EVALSHA", "SET", "DEL", "INFO", "PEXPIRE", "ZSCORE")
        for word in ("--rename-command", name, "")
    ]
    shows_nothing(call, redis_store(own_server(*renamed).url()), one)


@every_call
@pytest.mark.parametrize("url", ["rediss://127.0.0.1:{port}/0", "sentinel://127.0.0.1:{port}/0"])
def test_no_connection(own_server: StartServer, one: LeaseSpec, url: str, call: Call) -> None:
    """The error of a missing TLS server or Sentinel shows no token."""
    server = own_server()
    store = RedisStore(connector(url.format(port=server.port), {"master_name": "m"}, None, TIMEOUT), TIMEOUT)
    shows_nothing(call, store, one)


@pytest.mark.parametrize("call", [CALLS["acquire"], CALLS["renew"]])
def test_tls(certificate: tuple[Path, Path], redis_store: MakeStore, one: LeaseSpec, call: Call) -> None:
    """The error of a closed TLS connection, which sends from Python code, shows no token."""
    server, port = start_with_tls(certificate)
    store = redis_store(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate[0]}")
    call(store, one)
    server.close()
    shows_nothing(call, store, one)


def test_password_is_not_shown(own_server: StartServer, redis_store: MakeStore, one: LeaseSpec) -> None:
    """The error of a refused login shows no password, although redis-py has it in its variables."""
    server = own_server("--requirepass", "right")
    store = redis_store(server.url().replace("redis://", f"redis://:{WRONG}@"))
    with pytest.raises(StoreError) as refused:
        store.acquire(one)
    assert [] == leaks(refused.value, TOKEN, WRONG)


class Struck(Exception):
    """Raised by a signal handler."""


def test_interrupted_call(own_server: StartServer, redis_store: MakeStore, one: LeaseSpec) -> None:
    """An exception that a signal handler raises during the wait for a reply shows no token."""

    def strike(*_: Any) -> None:
        raise Struck

    server = own_server()
    store = redis_store(server.url(), 10.0)
    store.acquire(one)
    before = signal.signal(signal.SIGVTALRM, strike)
    main = threading.main_thread().ident or 0
    server.pause()
    try:
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGVTALRM)).start()
        with pytest.raises(Struck) as struck:
            store.renew([one])
    finally:
        signal.signal(signal.SIGVTALRM, before)
        server.resume()
    assert [] == leaks(struck.value, TOKEN)


def test_frames_of_a_run(own_server: StartServer) -> None:
    """The frames between a task's caller and the store show no token, although their variables hold the request."""
    server = own_server()
    app = Celery("shown", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.update(singleton_lock_url=server.url(), singleton_lock_eager=True)

    def work() -> None: ...

    task = app.task(base=SingletonTask, name="shown", on_store_error="raise")(work)
    server.stop()
    with pytest.raises(StoreError) as raised:
        task.apply(throw=True)
    assert [] == token_leaks(raised.value)
    app.close()


def token_leaks(raised: BaseException) -> list[str]:
    """Return the names of variables and errors that show the token of the request among the variables."""
    values = [value for _, variables in frames(raised.__traceback__) for value in variables.values()]
    (token,) = {value.token for value in values if isinstance(value, LeaseSpec)}
    return leaks(raised, token)
