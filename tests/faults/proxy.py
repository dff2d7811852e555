"""A TCP proxy that simulates network faults, at bytes that the test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.servers import free_port

_CHUNK = 65536


class Proxy:
    """Forwards one port of the loopback interface to another, with faults that can be changed at any time.

    ``hanging``: connections stay open and nothing passes. ``delay``: seconds by which each reply is delayed.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = free_port()
        self.hanging = threading.Event()
        self.delay = 0.0
        self.dropped = 0
        self._drop: tuple[list[bytes], int] = ([], 0)
        self._drops = 0  # how many of these requests are still to come, of which every second gets no reply
        self._made = self._silent = 0  # numbers of all connections, and of those that are silent for good
        self._closed = False
        self._pairs: list[_Pair] = []
        self._mutex = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and refuse new ones."""
        self._closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all open connections; new ones are accepted."""
        with self._mutex:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.end()

    def silence(self) -> None:
        """Forward nothing more on the existing connections, and leave them open."""
        self._silent = self._made

    def drop_reply(self, requests: list[bytes], after: int = 0, times: int = 1) -> None:
        """Forward the next request that contains one of these, and close the connection after ``after`` bytes of its reply.

        Do so for every second of them, so many times: a call that is sent again is answered.
        """
        self._drop, self._drops = (requests, after), 2 * times - 1

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
            self._made += 1
            pair = _Pair(self, self._made, client, server)
            with self._mutex:
                self._pairs.append(pair)

    def wants_drop(self, data: bytes) -> int | None:
        """Return how many bytes of the reply to this request may pass; None for all."""
        with self._mutex:
            if not self._drops or not any(request in data for request in self._drop[0]):
                return None
            self._drops -= 1
            return None if self._drops % 2 else self._drop[1]

    def wait(self, number: int) -> None:
        """Block while the proxy hangs, or for good if the connection is silent."""
        while (self.hanging.is_set() or number <= self._silent) and not self._closed:
            time.sleep(0.02)


class _Pair:
    """Both directions of one connection."""

    def __init__(self, proxy: Proxy, number: int, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._number = number
        self._client = client
        self._server = server
        self._passes: int | None = None
        self._running = 2
        self._mutex = threading.Lock()
        for direction in (self._requests, self._replies):
            threading.Thread(target=self._run, args=(direction,), daemon=True).start()

    def _run(self, direction: object) -> None:
        with contextlib.suppress(OSError):
            direction()  # type: ignore[operator]
        self.end()
        with self._mutex:
            self._running -= 1
            if not self._running:  # before that, the other thread may use a number that a new socket would get
                self._client.close()
                self._server.close()

    def end(self) -> None:
        """Shut down both connections; the thread of the last direction closes them."""
        with self._mutex:
            for end in (self._client, self._server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

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
                # Counted first: a short reply may pass completely, and then the client does not wait.
                self._proxy.dropped += 1
                self._client.sendall(data[: self._passes])
                return
            self._client.sendall(data)
