"""What a Redis server is sent, seen with MONITOR."""

from __future__ import annotations

import contextlib
import secrets
import threading

import redis

#: Commands with which the test's own marking connection introduces itself.
OF_THE_TEST = {"CLIENT", "HELLO", "ECHO"}


class Monitor:
    """Records with MONITOR what a server is sent, without what scripts do inside."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = redis.Redis.from_url(url)
        self.commands: list[str] = []

    def __enter__(self) -> Monitor:
        self._ready = threading.Event()
        self._mark = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def _listen(self) -> None:
        with redis.Redis.from_url(self._url).monitor() as monitor:
            self._ready.set()
            for line in monitor.listen():
                if self._mark in line["command"]:
                    return
                if line["client_type"] != "lua":
                    self.commands.append(line["command"])

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.closing(redis.Redis.from_url(self._url)) as client:
            client.echo(self._mark)
        self._thread.join(10)
        self.commands = [c for c in self.commands if c.split()[0] not in OF_THE_TEST]

    def where(self, *words: str) -> list[int]:
        """Return the positions of the commands that contain all of these words."""
        commands = enumerate(self.commands)
        return [at for at, command in commands if all(word in command for word in words)]
