"""Stores behind TLS: certificates are checked unless the settings disable it."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import StoreUnavailable
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest
from tests.contract.conftest import MakeStore, start_with_tls
from tests.servers import is_listening, until

MakeRequest = Callable[..., LeaseRequest]


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
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        redis_store(f"rediss://localhost:{tls_port}/0").acquire(lease_request())


@pytest.mark.parametrize("required", ["required", "CERT_REQUIRED"])
def test_unknown_certificate_is_refused_when_asked(
    tls_port: int, redis_store: MakeStore, lease_request: MakeRequest, required: str
) -> None:
    """An explicit requirement in either spelling refuses an unknown certificate."""
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        redis_store(f"rediss://localhost:{tls_port}/0?ssl_cert_reqs={required}").acquire(lease_request())


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
    with pytest.raises(StoreUnavailable, match=r"(?i)(certificate|hostname)"):
        store.acquire(lease_request())


def test_url_counts_before_setting(tls_port: int, redis_store: MakeStore, lease_request: MakeRequest) -> None:
    """Certificate options in the URL override the setting."""
    store = redis_store(f"rediss://localhost:{tls_port}/0?ssl_cert_reqs=required", tls={"ssl_cert_reqs": ssl.CERT_NONE})
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        store.acquire(lease_request())


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
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        acquired({"ssl_cert_reqs": ssl.CERT_REQUIRED})
