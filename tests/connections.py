"""Counts the connections of this process to a server."""

from __future__ import annotations

import gc
import os
from typing import Any

from redis import Redis

from tests.servers import RedisServer


class Connections:
    """Counts the clients of a server besides itself, and the files of this process."""

    def __init__(self, server: RedisServer) -> None:
        self._client: Any = Redis.from_url(server.url())
        gc.collect()  # closes what earlier tests have left
        self._client.ping()  # its own connection does not count
        self._files = len(os.listdir("/proc/self/fd"))

    def clients(self) -> int:
        """Return how many clients the server has."""
        return len(self._client.client_list(_type="normal")) - 1

    def check(self, clients: int, files: int = 0) -> None:
        """Check that there are no more clients, and no more files than at first, than these."""
        found = self.clients(), self.more_files()
        assert found[0] <= clients, found
        assert found[1] <= files, found

    def more_files(self) -> int:
        """Return how many more files this process has than at first."""
        return len(os.listdir("/proc/self/fd")) - self._files

    def close(self) -> None:
        self._client.close()

    def shut_down(self) -> None:
        """Have the server end."""
        self._client.shutdown(nosave=True)
