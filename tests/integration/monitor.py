"""The commands that clients send to a Redis server, read with MONITOR."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading

import redis

from tests.servers import until


class Monitor:
    """Records the commands that clients send to a server, without those inside scripts.

    The record includes the handshake commands and the number of new connections: servers before Redis 7.2 do not show the
    handshake of redis-py. Only the connection that marks the end of the record is left out.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # No timeout: a server that has nothing to tell, or that a test has stopped, ends no record.
        self._client = redis.Redis.from_url(url, single_connection_client=True, socket_timeout=None)
        self._lines: list[tuple[str, str]] = []  # the client's address and port, and its command
        self._marker = ""
        self._names = 0
        self._connections_before = 0
        #: How many connections were made while commands were recorded.
        self.connections = 0

    def __enter__(self) -> Monitor:
        self._ready = threading.Event()
        self._mark = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        self._connections_before = self._count_connections()
        return self

    def _listen(self) -> None:
        with redis.Redis.from_url(self._url, socket_timeout=None).monitor() as monitor:
            # redis-py 4 looks for the last bracket of a line, which may be in the text of a script.
            monitor.monitor_re = re.compile(r"\[(\d+) (.*?)\] (.*)")
            self._ready.set()
            for line in monitor.listen():
                sender = f"{line['client_address']}:{line['client_port']}"
                if self._mark in line["command"]:
                    self._marker = sender
                    return
                if (
                    ":tasks " in line["command"]
                ):  # a worker sends the names of its tasks each minute, over a new connection
                    self._names += 1
                elif line["client_type"] != "lua":
                    self._lines.append((sender, line["command"]))

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.closing(self._client):
            made = self._count_connections() - self._connections_before
            self._client.echo(self._mark)
        self._thread.join(60)
        self.connections = made - self._names
        assert self._marker, "the end of the record was not seen"

    def _count_connections(self) -> int:
        return int(self._client.info("stats")["total_connections_received"])

    @property
    def commands(self) -> list[str]:
        """The recorded commands so far."""
        return [command for sender, command in self._lines if sender != self._marker]

    def so_far(self) -> list[str]:
        """Return the commands that the server has received by now."""
        word = secrets.token_hex(8)
        self._client.echo(word)
        self._marker = until(lambda: [sender for sender, command in self._lines if word in command], "the echo")[0]
        return self.commands

    def where(self, *words: str) -> list[int]:
        """Return the positions of the commands that contain all of these words."""
        commands = enumerate(self.commands)
        return [at for at, command in commands if all(word in command for word in words)]
