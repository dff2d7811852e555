"""Serves the metrics of `contrib.prometheus` over HTTP, with a path that tells whether this process lives."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from celery_singleton_lock import locks
from celery_singleton_lock.contrib.prometheus import metrics_app
from celery_singleton_lock.errors import StoreUnavailable

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each request in a thread. On `::`, the address of all interfaces, it takes IPv4, too."""

    daemon_threads = True

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, self.server_address[0] != "::")
        TCPServer.server_bind(self)  # that of HTTPServer asks DNS for the name of this host
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log no requests."""


def _with_health(metrics: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that tells on `/health` that this process answers, and asks the store on all other paths."""

    def application(environ: Mapping[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/health":
            return metrics(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"ok\n"]

    return application


def serve(app: Any, host: str, port: int, listening: Callable[[str], object]) -> None:
    """Serve the metrics until SIGTERM or SIGINT comes; `listening` is told the URL.

    Arguments:
        host: empty for all interfaces.

    Raises:
        ConfigurationError: the app has no store, or one that keeps no records.
        StoreError: the store refuses the login. One that cannot be reached may come back.
        OSError: the address cannot be used.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in the server's threads too, so that they end this one's wait
    with suppress(StoreUnavailable):
        locks.tasks(app)
    host = host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    kind = _ServerIPv6 if ":" in host else _Server
    server = make_server(host, port, _with_health(metrics_app(app)), kind, _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    listening(f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics")
    signal.sigwait(_SIGNALS)
    server.shutdown()
    server.server_close()
