"""Connections that are idle, and a cap on how many are in use.

A connection is put back only after a complete reply. One whose call failed or was interrupted is closed and forgotten, so nobody
reads the reply of an earlier call, and no capacity is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_singleton_lock.store.redis.connection import Command, exchange
from celery_singleton_lock.store.redis.errors import is_read_only, store_error_for, without_frames


class ConnectionPool:
    """Executes commands on connections that it makes.

    Arguments:
        connect: makes a connection, not yet connected.
        limit: how many are in use at most; None: any number.
    """

    def __init__(self, connect: Callable[[], Any], limit: int | None = None) -> None:
        self._connect = connect
        self._idle: deque[Any] = deque()  # the one used last is used next: few connections are made
        self._permits = threading.Semaphore(limit) if limit else None
        self._turn = threading.Semaphore()

    def execute(self, command: Command, deadline: float, once: bool = False) -> Any:
        """Send a command and return the reply; `once`: on a new connection, on which it is never sent again.

        Raises:
            StoreError, StoreUnavailable: see `store_error_for`.
            NoScriptError: the server does not know the script.
        """
        try:
            if self._permits is None:
                return self._execute(command, deadline, once)
            self._wait_for_permit(self._permits, deadline)
            try:  # an asynchronous exception right after either semaphore was acquired loses its permit
                return self._execute(command, deadline, once)
            finally:
                self._permits.release()
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            raise store_error_for(error) from without_frames(error)

    def _wait_for_permit(self, permits: threading.Semaphore, deadline: float) -> None:
        """Acquire a permit in turn: a thread that has just released one does not overtake those that wait."""
        in_turn = self._turn.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            if not permits.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no connection to the store was free in time")
        finally:
            if in_turn:
                self._turn.release()

    def _execute(self, command: Command, deadline: float, once: bool) -> Any:
        connection = self._connect() if once else self._take()
        try:
            reply = exchange(connection, command, deadline)
        except BaseException as error:
            if isinstance(error, ResponseError) and not is_read_only(error):  # the reply is complete
                self._idle.append(connection)
            else:
                connection.disconnect()
            raise
        self._idle.append(connection)
        return reply

    def _take(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().disconnect()
