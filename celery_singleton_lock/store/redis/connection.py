"""One command on one connection of redis-py, by a deadline.

This works below redis-py's client, which would send a command again on its own and wait between tries. It is the only module that
uses redis-py's connections below their public surface (`_connect`, `_sock`): checked with redis-py 4.6 to 8.1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redis import exceptions

from celery_singleton_lock.store.redis.errors import PERMANENT_ERRORS

#: Seconds that sending, and then reading, may take at least: a body that keeps the GIL may have used up the deadline.
MIN_SEND_OR_READ_TIME = 0.05


class Command:
    """The words of a command. Error trackers that keep the variables of frames show its mute repr, and not the token.

    All are texts: hiredis 3.5 crashes if a signal handler raises while it packs a number.
    """

    #: Whether the others of a `Batch` count though the server refuses this one, whose reply is None then.
    optional = False

    def __init__(self, *words: str) -> None:
        self.texts = words

    def packed(self, connection: Any) -> bytes:
        """Return what is sent."""
        return b"".join(connection.pack_command(*self.texts))

    def reply(self, connection: Any) -> Any:
        """Read and return the reply."""
        return connection.read_response()


class Batch(Command):
    """Several commands that are sent together; the reply is the list of theirs, or the first error of one that counts."""

    def __init__(self, commands: Sequence[Command]) -> None:
        super().__init__()
        self._commands = commands

    def packed(self, connection: Any) -> bytes:
        return b"".join([command.packed(connection) for command in self._commands])

    def reply(self, connection: Any) -> Any:
        replies = [_reply_or_error(command, connection) for command in self._commands]  # else some would stay unread
        for command, reply in zip(self._commands, replies, strict=True):
            if isinstance(reply, exceptions.NoScriptError) or (isinstance(reply, Exception) and not command.optional):
                raise reply
        return [None if isinstance(reply, Exception) else reply for reply in replies]


def _reply_or_error(command: Command, connection: Any) -> Any:
    try:
        return command.reply(connection)
    except exceptions.ResponseError as error:
        return error


class _DeadlineSocket:
    """A socket whose operations all end by its connection's deadline: redis-py looks each of them up when it calls it.

    A timeout that is less than a millisecond wrong stays: to set it is a system call, for which Python releases the GIL.
    """

    def __init__(self, sock: Any, connection: Any) -> None:
        self._sock = sock
        self._connection = connection
        self._timeout = 0.0

    def __getattr__(self, name: str) -> Any:
        if name in ("recv", "recv_into", "sendall"):
            left = max(0.001, self._connection.deadline - time.monotonic())  # its `socket_timeout`
            if abs(left - self._timeout) >= 0.001:
                self._timeout = left
                self._sock.settimeout(left)
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        """Called by redis-py."""
        self._timeout = 0.0
        self._sock.settimeout(seconds)


class _Deadline:
    """Mixin for redis-py's connections: connect, handshake, commands and replies end by `deadline`."""

    deadline = 0.0

    @property
    def socket_timeout(self) -> float:
        """Seconds left. redis-py asks for each address of a host, and once more before it loads certificates and shakes hands."""
        return max(0.001, self.deadline - time.monotonic())

    @socket_timeout.setter
    def socket_timeout(self, value: object) -> None:
        """Ignore what redis-py sets: the deadline counts."""

    socket_connect_timeout = socket_timeout

    def _connect(self) -> Any:
        return _DeadlineSocket(super()._connect(), self)  # type: ignore[misc]


def with_deadline(kind: Any) -> Any:
    """Return a connection class of redis-py with a `deadline`."""
    return type(f"Deadline{kind.__name__}", (_Deadline, kind), {})


def exchange(connection: Any, command: Command, deadline: float) -> Any:
    """Send a command and return the reply. It is sent once more where the server has closed a connection that was idle."""
    was_idle = connection._sock is not None
    try:
        return _exchange(connection, command, deadline)
    except (*PERMANENT_ERRORS, exceptions.TimeoutError, TimeoutError):
        raise
    except (exceptions.ConnectionError, OSError):
        connection.disconnect()
        if not was_idle:
            raise
    return _exchange(connection, command, deadline)


def _exchange(connection: Any, command: Command, deadline: float) -> Any:
    connection.deadline = deadline
    if connection._sock is None:
        connection.connect()
    connection.deadline = max(deadline, time.monotonic() + MIN_SEND_OR_READ_TIME)
    # In one write: a server that refuses a command after its first words closes the connection.
    connection.send_packed_command([command.packed(connection)], check_health=False)
    connection.deadline = max(deadline, time.monotonic() + MIN_SEND_OR_READ_TIME)
    return command.reply(connection)
