"""What a Redis server is sent, seen with MONITOR."""

from __future__ import annotations

import contextlib
import secrets
import threading

import redis


class Monitor:
    """Records with MONITOR what a server is sent, without what scripts do inside.

    What connections introduce themselves with is recorded too, and how many were made: servers before Redis 7.2 do not show
    what a connection of redis-py begins with. Only the connection that marks the end of the record is left out.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = redis.Redis.from_url(url, single_connection_client=True)
        self._lines: list[tuple[str, str]] = []  # whose command: an address and a port
        self._marker = ""
        self._connections_before = 0
        #: How many connections were made while commands were recorded.
        self.connections = 0

    def __enter__(self) -> Monitor:
        self._ready = threading.Event()
        self._mark = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        self._connections_before = self._count_connections()
        return self

    def _listen(self) -> None:
        with redis.Redis.from_url(self._url).monitor() as monitor:
            self._ready.set()
            for line in monitor.listen():
                sender = f"{line['client_address']}:{line['client_port']}"
                if self._mark in line["command"]:
                    self._marker = sender
                    return
                if line["client_type"] != "lua":
                    self._lines.append((sender, line["command"]))

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.closing(self._client):
            self.connections = self._count_connections() - self._connections_before
            self._client.echo(self._mark)
        self._thread.join(10)
        assert self._marker, "the end of the record was not seen"

    def _count_connections(self) -> int:
        return int(self._client.info("stats")["total_connections_received"])

    @property
    def commands(self) -> list[str]:
        """The commands so far."""
        return [command for sender, command in self._lines if sender != self._marker]

    def where(self, *words: str) -> list[int]:
        """Return the positions of the commands that contain all of these words."""
        commands = enumerate(self.commands)
        return [at for at, command in commands if all(word in command for word in words)]
