"""The floor under every client: bytes prepared beforehand, over a plain blocking socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

#: Follows a command whose reply is measured, and marks that reply's end.
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


class RawSocket:
    """A connection to a Redis server, as near to the wire as Python gets.

    Arguments:
        port: of the server, on the loopback interface.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> RawSocket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def prepared(self, command: Sequence[str]) -> Callable[[], None]:
        """Send this command once, and answer a function that sends it again and reads a reply of the same length.

        Raises:
            RuntimeError: the server refused the command.
        """
        packed = _packed(command)
        self._socket.sendall(packed + PING)
        reply = b""
        while not reply.endswith(PONG):
            reply += self._socket.recv(65536)
        if reply.startswith(b"-"):
            raise RuntimeError(f"{command[0]}: {reply.decode()}")
        return self._exchange(packed, len(reply) - len(PONG))

    def _exchange(self, packed: bytes, length: int) -> Callable[[], None]:
        send, receive = self._socket.sendall, self._socket.recv

        def exchange() -> None:
            send(packed)
            left = length
            while left > 0:
                chunk = receive(65536)
                if not chunk:
                    raise ConnectionError("the server closed the connection")
                left -= len(chunk)

        return exchange

    def all_of(self, commands: Sequence[Sequence[str]]) -> Callable[[], None]:
        """A function that sends these commands, one after the other has been answered."""
        calls = [self.prepared(command) for command in commands]

        def exchange() -> None:
            for call in calls:
                call()

        return exchange


def _packed(command: Sequence[str]) -> bytes:
    words = [word.encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
