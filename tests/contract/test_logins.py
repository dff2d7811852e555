"""Logins: credential providers under Celery's names, and the errors of refused logins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from celery import Celery
from redis import Redis
from redis.credentials import CredentialProvider

from celery_singleton_lock import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.protocol import AcquireStatus, RenewResult
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import MakeStore
from tests.servers import Process, RedisServer, free_port, is_listening, redis_program, until

MakeRequest = Callable[..., LeaseSpec]

PASSWORD = "pa55-of-the-default"
USER, USER_PASSWORD = "locks", "pa55-of-the-user"
#: Two passwords that no server knows: no error may show them.
WRONG = ("wr0ng-one", "wr0ng-two")
WORDS = "wrong or missing password"


class DefaultUser(CredentialProvider):
    """Returns the password of the default user."""

    def get_credentials(self) -> tuple[str]:
        return (PASSWORD,)


class AclUser(CredentialProvider):
    """Returns a user and its password."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, USER_PASSWORD


class Outdated(CredentialProvider):
    """Returns a password that is no longer valid."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, WRONG[0]


class Rotating(CredentialProvider):
    """Returns different credentials on each call."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, ...]] = [(USER, USER_PASSWORD), (PASSWORD,)]

    def get_credentials(self) -> tuple[str, ...]:
        return self.answers.pop(0)


class Away(CredentialProvider):
    """Fails because the service with the password is unreachable."""

    def get_credentials(self) -> tuple[str, str]:
        raise RuntimeError(f"no answer for {WRONG[0]}")


class NoProvider:
    """Is not a credential provider."""


class NeedsMore(CredentialProvider):
    """Needs an argument, so it cannot be created from its name."""

    def __init__(self, secret: str) -> None: ...


def made() -> CredentialProvider:
    """Return a provider, like a provider class does."""
    return AclUser()


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """Yield a Redis with a password for the default user, and with a second user."""
    server = RedisServer("--requirepass", PASSWORD, "--user", USER, "on", f">{USER_PASSWORD}", "~*", "&*", "+@all")
    with server:
        yield server


def named(provider: object) -> str:
    return f"{__name__}.{provider.__name__}"  # type: ignore[attr-defined]


# -- credential providers ------------------------------------------------------------------------


@pytest.mark.parametrize("provider", [DefaultUser, AclUser, made])
@pytest.mark.parametrize("separator", [".", ":"])
def test_provider_in_url(
    guarded: RedisServer, redis_store: MakeStore, lease_request: MakeRequest, provider: Any, separator: str
) -> None:
    """A URL may name a credential provider in both of Celery's spellings; the provider overrides a login in the URL."""
    name = separator.join(named(provider).rsplit(".", 1))
    for login in ("", f"someone:{WRONG[0]}@"):
        url = guarded.url().replace("redis://", f"redis://{login}") + f"?credential_provider={name}"
        assert redis_store(url).acquire(lease_request(login or "nobody")).status is AcquireStatus.GRANTED


@pytest.mark.parametrize("provider", [AclUser(), named(AclUser)], ids=["object", "name"])
def test_provider_among_options(guarded: RedisServer, lease_request: MakeRequest, provider: Any) -> None:
    """A provider may also be an option, as an object or a name; a provider in the URL overrides it."""
    store = RedisStore(connector(guarded.url(), {"credential_provider": provider}))
    assert store.acquire(lease_request("option")).status is AcquireStatus.GRANTED
    store.close()
    url = f"{guarded.url()}?credential_provider={named(AclUser)}"
    store = RedisStore(connector(url, {"credential_provider": Outdated(), "password": WRONG[0]}))
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED
    store.close()


@pytest.mark.parametrize("setting", ["broker_url", "result_backend", "singleton_lock_url"])
def test_provider_in_settings(guarded: RedisServer, lease_request: MakeRequest, setting: str) -> None:
    """A provider works in each setting that may name the store."""
    app = Celery("login", set_as_current=False)
    app.conf.update({"broker_url": "memory://", setting: f"{guarded.url()}?credential_provider={named(AclUser)}"})
    store = context_of(app).store
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED
    store.close()
    app.close()


def test_provider_is_asked_for_each_connection(
    guarded: RedisServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """The store asks the provider for credentials at each new connection."""
    store, one = redis_store(f"{guarded.url()}?credential_provider={named(Rotating)}"), lease_request()
    store.acquire(one)
    assert USER == store.command("ACL", "WHOAMI")
    store.close()
    assert [RenewResult.RENEWED] == store.renew([one])
    assert "default" == store.command("ACL", "WHOAMI")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module.Provider", "no_such_module"),
        (f"{__name__}.NoSuchProvider", "NoSuchProvider"),
        ("nothing", "nothing"),
        ("not a name", "not a name"),
        (f"{__name__}.NoProvider", "CredentialProvider"),
        (f"{__name__}.NeedsMore", "TypeError"),
        (f"{__name__}.PASSWORD", "TypeError"),
    ],
)
@pytest.mark.parametrize("scheme", ["redis", "sentinel"])
def test_bad_provider_is_refused(name: str, says: str, scheme: str) -> None:
    """A name that is no credential provider is refused with a clear message before any connection."""
    with pytest.raises(ConfigurationError, match=r"credential_provider") as refused:
        connector(f"{scheme}://127.0.0.1:1/0?credential_provider={name}", {"master_name": "m"})
    assert name in str(refused.value)
    assert says in str(refused.value)
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("provider", [NoProvider(), 5])
def test_bad_provider_object_is_refused(provider: object) -> None:
    """An object that is no credential provider is refused."""
    with pytest.raises(ConfigurationError, match=f"credential_provider.*{type(provider).__name__}"):
        connector("redis://127.0.0.1:1/0", {"credential_provider": provider})


def test_provider_that_fails(guarded: RedisServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A provider that raises counts as an outage, because its service may return soon; its error text is not shown."""
    store = redis_store(f"{guarded.url()}?credential_provider={named(Away)}")
    with pytest.raises(StoreUnavailable, match=r"credential provider.*RuntimeError") as unavailable:
        store.acquire(lease_request())
    assert WRONG[0] not in str(unavailable.value)


# -- refused logins ------------------------------------------------------------------------------


def refused_login(call: Callable[[], Any]) -> None:
    """Check that the call fails with a clear refusal that shows no password."""
    with pytest.raises(StoreError, match=WORDS) as refused:
        call()
    assert not isinstance(refused.value, StoreUnavailable)
    for password in (PASSWORD, USER_PASSWORD, *WRONG):
        assert password not in str(refused.value)


CALLS: Mapping[str, Callable[[RedisStore, LeaseSpec], Any]] = {
    "acquire": lambda store, lease_request: store.acquire(lease_request),
    "renew": lambda store, lease_request: store.renew([lease_request]),
    "release": lambda store, lease_request: store.release(lease_request, success=True),
    "holder": lambda store, lease_request: store.holder(lease_request.lock),
    "eviction_policy": lambda store, lease_request: store.eviction_policy(),
}


@pytest.mark.parametrize("login", ["", f":{WRONG[0]}@", f"{USER}:{WRONG[0]}@", f"nobody:{WRONG[0]}@"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_refused_login(
    guarded: RedisServer, redis_store: MakeStore, lease_request: MakeRequest, login: str, call: Callable[..., Any]
) -> None:
    """Each call with a wrong or missing password, or an unknown user, fails with a clear message, each time."""
    store = redis_store(guarded.url().replace("redis://", f"redis://{login}"))
    for _ in range(2):
        refused_login(lambda: call(store, lease_request()))


def test_refused_login_of_a_provider(guarded: RedisServer, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """A refused login from a provider fails with the same clear message."""
    store = redis_store(f"{guarded.url()}?credential_provider={named(Outdated)}")
    refused_login(lambda: store.acquire(lease_request()))


def test_large_command_without_a_login(
    guarded: RedisServer, redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """A long command without a login fails with the same message, although the server's protocol error differs."""
    store = redis_store(guarded.url())
    refused_login(lambda: store.command(*["x"] * 11))
    refused_login(lambda: store.command("SET", "k", "x" * 20000))


def test_refusal_that_is_no_login(redis_store: MakeStore, client: Any, lease_request: MakeRequest) -> None:
    """The message of another refusal does not mention passwords."""
    one = lease_request()
    client.set(one.lock, "theirs", px=5000)
    with pytest.raises(StoreError) as refused:
        redis_store().acquire(one)
    assert "password" not in str(refused.value)


def test_arguments_are_not_shown(
    own_server: Callable[..., RedisServer], redis_store: MakeStore, lease_request: MakeRequest
) -> None:
    """An unknown command shows neither a password nor a token, although the server's error quotes its arguments."""
    server = own_server("--rename-command", "AUTH", "", "--rename-command", "EVALSHA", "")
    one = LeaseSpec("b", "d", "t0ken", 30.0, "id")
    with pytest.raises(StoreError, match=r"(?i)unknown command.*evalsha") as refused:
        redis_store(server.url()).acquire(one)
    assert "t0ken" not in str(refused.value)
    with pytest.raises(StoreError, match=r"(?i)unknown command.*auth") as refused:
        redis_store(server.url().replace("redis://", f"redis://:{WRONG[0]}@")).acquire(one)
    assert WRONG[0] not in str(refused.value)


# -- through Sentinel ----------------------------------------------------------------------------

SENTINEL_PASSWORD = "pa55-of-the-sentinel"


@pytest.fixture(scope="module")
def sentinel(guarded: RedisServer) -> Iterator[str]:
    """Yield the URL of a Sentinel whose password differs from its server's."""
    port = free_port()
    path = guarded.directory / "sentinel.conf"
    path.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {guarded.directory}\nrequirepass {SENTINEL_PASSWORD}\n"
        f"sentinel monitor m 127.0.0.1 {guarded.port} 1\nsentinel auth-pass m {PASSWORD}\n"
    )
    process = Process([redis_program(), str(path), "--sentinel"], guarded.directory / "sentinel.log")
    process.start()
    url = f"sentinel://127.0.0.1:{port}/0"
    try:
        until(lambda: is_listening(port), "Sentinel")
        with Redis(port=port, password=SENTINEL_PASSWORD) as client:
            until(lambda: b"ok" in str(client.execute_command("SENTINEL", "CKQUORUM", "m")).lower().encode())
        yield url
    finally:
        process.kill()


def by_sentinel(url: str, own: str | None = SENTINEL_PASSWORD, **options: Any) -> RedisStore:
    more = {"sentinel_kwargs": {"password": own}} if own else {}
    return RedisStore(connector(url, {"master_name": "m", **more, **options}, None, 2.0), 2.0)


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("", {"username": USER, "password": USER_PASSWORD}),
        ("", {"credential_provider": AclUser()}),
        (f"?credential_provider={named(AclUser)}", {}),
    ],
    ids=["password", "object", "url"],
)
def test_sentinel(sentinel: str, lease_request: MakeRequest, query: str, options: dict[str, Any]) -> None:
    """Through Sentinel the server gets its own login, also from a credential provider; the Sentinel gets its own."""
    store = by_sentinel(sentinel + query, **options)
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED
    store.close()


SPELLINGS = {
    "celery's": "sentinel://127.0.0.1:1;sentinel://127.0.0.1:{port}/1?master_name=m",
    "others'": "redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/m/1",
    "login": "redis+sentinel://{login}@127.0.0.1:{port}/m/1",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_name_of_the_primary_in_the_url(sentinel: str, lease_request: MakeRequest, spelling: str) -> None:
    """The URL may name the primary, so that Celery's transport options need not. Other Sentinels than the first are asked."""
    login = f"{USER}:{USER_PASSWORD}"
    url = SPELLINGS[spelling].format(port=sentinel.rpartition(":")[2].partition("/")[0], login=login)
    options = {} if spelling == "login" else {"username": USER, "password": USER_PASSWORD}
    options |= {"master_name": "not this one", "sentinel_kwargs": {"password": SENTINEL_PASSWORD}}
    store = RedisStore(connector(url, options, None, 2.0), 2.0)
    one = lease_request()
    assert AcquireStatus.GRANTED is store.acquire(one).status
    assert "db=1" in str(store.command("CLIENT", "INFO"))
    store.release(one, True)
    store.close()


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (SENTINEL_PASSWORD, {}),
        (SENTINEL_PASSWORD, {"password": WRONG[0]}),
        (SENTINEL_PASSWORD, {"credential_provider": Outdated()}),
        (WRONG[1], {"password": PASSWORD}),
        (None, {"password": PASSWORD}),
    ],
    ids=["none", "wrong", "provider", "sentinel's wrong", "sentinel's none"],
)
def test_refused_login_by_sentinel(
    sentinel: str, lease_request: MakeRequest, own: str | None, options: dict[str, Any]
) -> None:
    """Through Sentinel a refused login fails with a clear message, whether the server or the Sentinel refuses it."""
    store = by_sentinel(sentinel, own, **options)
    refused_login(lambda: store.acquire(lease_request()))
    store.close()
