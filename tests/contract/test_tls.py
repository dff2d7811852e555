"""Stores behind TLS: certificates are checked unless the settings disable it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, StoreError, StoreUnavailable
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import MakeStore, make_certificate, start_with_tls
from tests.servers import is_listening, until

MakeRequest = Callable[..., LeaseSpec]


def refused(call: Callable[[], object], match: str) -> None:
    """Check that a call fails for good, and not as in an outage."""
    with pytest.raises(StoreError, match=match) as found:
        call()
    assert not isinstance(found.value, StoreUnavailable)


@pytest.fixture(scope="module")
def tls_port(certificate: tuple[Path, Path]) -> Iterator[int]:
    """Yield the TLS port of a Redis with a self-signed certificate."""
    server, port = start_with_tls(certificate)
    try:
        until(lambda: is_listening(port), "TLS port")
        yield port
    finally:
        server.close()


def test_unknown_certificate_is_refused(tls_port: int, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """By default the store refuses a certificate that no known authority has signed."""
    refused(lambda: redis_store(f"rediss://localhost:{tls_port}/0").acquire(lease_request()), r"(?i)certificate")


@pytest.mark.parametrize("required", ["required", "CERT_REQUIRED"])
def test_unknown_certificate_is_refused_when_asked(
    tls_port: int, redis_store: MakeStore, lease_request: MakeRequest, required: str
) -> None:
    """An explicit requirement in either spelling refuses an unknown certificate."""
    store = redis_store(f"rediss://localhost:{tls_port}/0?ssl_cert_reqs={required}")
    refused(lambda: store.acquire(lease_request()), r"(?i)certificate")


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
@pytest.mark.parametrize("unchecked", ["none", "CERT_NONE"])
def test_unchecked_by_url(
    tls_port: int, redis_store: MakeStore, lease_request: MakeRequest, unchecked: str, scheme: str
) -> None:
    """``ssl_cert_reqs=none`` and ``CERT_NONE`` in the URL disable the check."""
    store = redis_store(f"{scheme}://localhost:{tls_port}/0?ssl_cert_reqs={unchecked}")
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED


@pytest.mark.parametrize("unchecked", [ssl.CERT_NONE, "CERT_NONE", "none", 0])
def test_unchecked_by_setting(
    tls_port: int, redis_store: MakeStore, lease_request: MakeRequest, unchecked: Any
) -> None:
    """The spellings of Celery's own settings disable the check, too."""
    store = redis_store(f"rediss://localhost:{tls_port}/0", tls={"ssl_cert_reqs": unchecked})
    assert store.acquire(lease_request()).status is AcquireStatus.GRANTED


def test_known_authority(
    tls_port: int, redis_store: MakeStore, lease_request: MakeRequest, certificate: tuple[Path, Path]
) -> None:
    """A certificate of a configured authority is accepted, by URL and by setting."""
    cert = certificate[0]
    by_url = redis_store(f"rediss://localhost:{tls_port}/0?ssl_ca_certs={cert}")
    assert by_url.acquire(lease_request("a")).status is AcquireStatus.GRANTED
    by_setting = redis_store(f"rediss://localhost:{tls_port}/0", tls={"ssl_ca_certs": str(cert)})
    assert by_setting.acquire(lease_request("b")).status is AcquireStatus.GRANTED


def test_wrong_host_name(
    tls_port: int,
    redis_store: MakeStore,
    lease_request: MakeRequest,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the store refuses a valid certificate of another host."""
    import socket

    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", tls_port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: [address])
    store = redis_store(f"rediss://other.example:{tls_port}/0?ssl_ca_certs={certificate[0]}")
    refused(lambda: store.acquire(lease_request()), r"(?i)(certificate|hostname)")


def test_url_counts_before_setting(tls_port: int, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """Certificate options in the URL override the setting."""
    store = redis_store(f"rediss://localhost:{tls_port}/0?ssl_cert_reqs=required", tls={"ssl_cert_reqs": ssl.CERT_NONE})
    refused(lambda: store.acquire(lease_request()), r"(?i)certificate")


@pytest.mark.parametrize(
    ("url", "ssl_options", "scheme"),
    [
        ("broker_url", "broker_use_ssl", "rediss"),
        ("result_backend", "redis_backend_use_ssl", "rediss"),
        ("singleton_lock_url", "broker_use_ssl", "rediss"),
        ("singleton_lock_url", "redis_backend_use_ssl", "rediss"),
        ("singleton_lock_url", "broker_use_ssl", "valkeys"),
        ("singleton_lock_url", "redis_backend_use_ssl", "valkeys"),
    ],
)
def test_certificates_of_celerys_settings(
    tls_port: int, certificate: tuple[Path, Path], lease_request: MakeRequest, url: str, ssl_options: str, scheme: str
) -> None:
    """An app's store uses the certificate options of Celery's own settings, and is unreachable without them."""

    def acquired(given: dict[str, Any]) -> AcquireStatus:
        app = Celery("tls", set_as_current=False)
        app.conf.update({"broker_url": "memory://", url: f"{scheme}://localhost:{tls_port}/0", ssl_options: given})
        store = context_of(app).store
        try:
            return store.acquire(lease_request()).status
        finally:
            store.close()
            app.close()

    assert AcquireStatus.GRANTED is acquired({"ssl_ca_certs": str(certificate[0])})
    refused(lambda: acquired({"ssl_cert_reqs": ssl.CERT_REQUIRED}), r"(?i)certificate")


# -- what waiting does not cure ------------------------------------------------------------------


def refused_soon(store: RedisStore, spec: LeaseSpec, match: str) -> None:
    """Check that a call is refused. With TLS 1.3, the server may close before the client has read why: then it is asked again."""

    def is_told() -> bool:
        with pytest.raises(StoreError) as found:
            store.acquire(spec)
        return type(found.value) is StoreError and re.search(match, str(found.value)) is not None

    until(is_told, "the server says why")


@pytest.fixture(scope="module", params=["TLSv1.2", "TLSv1.3"])
def port_for_clients(certificate: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the TLS port of a Redis that wants a certificate of its clients."""
    server, port = start_with_tls(certificate, "--tls-auth-clients", "yes", "--tls-protocols", request.param)
    try:
        until(lambda: is_listening(port), "TLS port")
        yield port
    finally:
        server.close()


def test_missing_client_certificate(
    port_for_clients: int,
    redis_store: MakeStore,
    lease_request: MakeRequest,
    certificate: tuple[Path, Path],
) -> None:
    """A server that wants a client certificate refuses a client without one for good; with one, it is used."""
    cert, key = certificate
    url = f"rediss://localhost:{port_for_clients}/0?ssl_ca_certs={cert}"
    refused_soon(redis_store(url), lease_request(), r"(?i)certificate|handshake")
    with_one = redis_store(f"{url}&ssl_certfile={cert}&ssl_keyfile={key}")
    assert with_one.acquire(lease_request()).status is AcquireStatus.GRANTED


def test_client_certificate_of_a_stranger(
    port_for_clients: int,
    redis_store: MakeStore,
    lease_request: MakeRequest,
    certificate: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """A client certificate that the server does not know is refused for good."""
    cert, key = make_certificate(tmp_path)
    url = f"rediss://localhost:{port_for_clients}/0?ssl_ca_certs={certificate[0]}&ssl_certfile={cert}&ssl_keyfile={key}"
    refused_soon(redis_store(url), lease_request(), r"(?i)alert|certificate")


def test_certificate_that_is_refused_in_mid_life(
    certificate: tuple[Path, Path], redis_store: MakeStore, lease_request: MakeRequest, tmp_path: Path
) -> None:
    """A certificate that was accepted, and is not any more, is an outage: another one may come."""
    server, port = start_with_tls(certificate)
    try:
        until(lambda: is_listening(port), "TLS port")
        store = redis_store(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate[0]}")
        store.acquire(lease_request())
        cert, key = make_certificate(tmp_path)
        redis_store(server.url()).command("CONFIG", "SET", "tls-cert-file", str(cert), "tls-key-file", str(key))
        store.close()
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate.*before, it was accepted"):
            store.acquire(lease_request())
    finally:
        server.close()


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path"])
def test_file_that_is_not_there(option: str, tmp_path: Path) -> None:
    """A certificate file that cannot be read is refused before any connection, by URL and by setting."""
    missing = tmp_path / "no-such.pem"
    with pytest.raises(ConfigurationError, match=f"singleton_lock_url: {option}={missing} cannot be read"):
        connector(f"rediss://localhost:1/0?{option}={missing}", {})
    with pytest.raises(ConfigurationError, match=f"{option}={missing} cannot be read"):
        connector("rediss://localhost:1/0", {}, {option: str(missing)})
