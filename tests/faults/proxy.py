"""A TCP proxy that does to a connection what a bad network does, at bytes that the test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.servers import free_port

_CHUNK = 65536


class Proxy:
    """Forwards one port of the loopback interface to another; how well, can be changed at any time.

    ``hanging``: connections stay open and nothing passes. ``delay``: seconds that each reply is kept back.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = free_port()
        self.hanging = threading.Event()
        self.delay = 0.0
        self.dropped = 0
        self._drop: tuple[bytes, int] | None = None
        self._made = self._silent = 0  # how many connections, and how many of them are silent for good
        self._closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._mutex = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse and end all connections."""
        self._closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections of now; new ones are accepted."""
        with self._mutex:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _end(*pair)

    def silence(self) -> None:
        """Let nothing pass any more on connections that were made before; they stay open."""
        self._silent = self._made

    def drop_reply(self, request: bytes, after: int = 0) -> None:
        """Forward the next request that contains this, and cut the connection after so many bytes of its reply."""
        self._drop = (request, after)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except ConnectionRefusedError:
                client.close()
                continue
            except OSError:
                return
            server.settimeout(None)
            with self._mutex:
                self._pairs.append((client, server))
            self._made += 1
            _Pair(self, self._made, client, server)

    def wants_drop(self, data: bytes) -> int | None:
        """Return how much of the reply to this request may pass; None: all of it."""
        if self._drop is None or self._drop[0] not in data:
            return None
        after, self._drop = self._drop[1], None
        return after

    def wait(self, number: int) -> None:
        """Hold back what comes on this connection, while hanging or once it is silent."""
        while (self.hanging.is_set() or number <= self._silent) and not self._closed:
            time.sleep(0.02)


class _Pair:
    """The two directions of one connection."""

    def __init__(self, proxy: Proxy, number: int, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._number = number
        self._client = client
        self._server = server
        self._passes: int | None = None
        for direction in (self._requests, self._replies):
            threading.Thread(target=self._run, args=(direction,), daemon=True).start()

    def _run(self, direction: object) -> None:
        with contextlib.suppress(OSError):
            direction()  # type: ignore[operator]
        _end(self._client, self._server)

    def _requests(self) -> None:
        while data := self._client.recv(_CHUNK):
            self._proxy.wait(self._number)
            passes = self._proxy.wants_drop(data)
            if passes is not None:
                self._passes = passes
            self._server.sendall(data)

    def _replies(self) -> None:
        while data := self._server.recv(_CHUNK):
            self._proxy.wait(self._number)
            if self._proxy.delay:
                time.sleep(self._proxy.delay)
            if self._passes is not None:
                self._proxy.dropped += 1  # first: the whole of a short reply may pass, and then nobody waits for this
                self._client.sendall(data[: self._passes])
                return
            self._client.sendall(data)


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
