"""A few connections that are idle, and a cap on how many are in use.

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

from celery_singleton_lock.store.access import Access
from celery_singleton_lock.store.redis.connection import Command, exchange
from celery_singleton_lock.store.redis.errors import is_of_this_connection, store_error_for, without_secrets

#: Idle connections that a pool without a limit keeps.
MOST_IDLE = 10


class Generation:
    """The connections of several pools that may be used: those made since it ended last."""

    number = 0

    def end(self) -> None:
        """Have each connection that is there now closed before its next use, so that another server may be found."""
        self.number += 1


class ConnectionPool:
    """Executes commands on connections that it makes.

    Arguments:
        connect: makes a connection, not yet connected.
        limit: how many are in use at most; None: any number.
        access: is told of refusals.
        generation: of the connections that it uses.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        limit: int | None = None,
        access: Access | None = None,
        generation: Generation | None = None,
    ) -> None:
        self._connect = connect
        self._access = access or Access()
        self._generation = generation or Generation()
        self._idle: deque[Any] = deque()  # the one used last is used next: few connections are made
        self._most_idle = limit or MOST_IDLE
        self._cap = _Cap(limit) if limit else None

    def execute(self, command: Command, deadline: float, once: bool = False) -> Any:
        """Send a command and return the reply; `once`: on a connection that is made anew, on which it is never sent again.

        Raises:
            StoreError, StoreUnavailable: see `store_error_for`.
            NoScriptError: the server does not know the script.
        """
        try:
            if self._cap is None:
                return self._execute(command, deadline, once)
            self._cap.enter(deadline)
            try:  # an asynchronous exception that strikes right before or after this block loses a permit
                return self._execute(command, deadline, once)
            finally:
                self._cap.leave()
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            is_script = command.texts[:1] in (("EVALSHA",), ("EVAL",))
            raise store_error_for(error, self._access, is_script) from without_secrets(error)

    def _execute(self, command: Command, deadline: float, once: bool) -> Any:
        connection = self._take()
        if once:
            connection.disconnect()
        try:
            reply = exchange(connection, command, deadline)
        except BaseException as error:
            if isinstance(error, ResponseError) and not is_of_this_connection(error):  # the reply is complete
                self._put_back(connection)
            else:
                connection.disconnect()
            raise
        self._put_back(connection)
        return reply

    def _take(self) -> Any:
        number = self._generation.number
        try:
            while (connection := self._idle.pop()).generation != number:
                connection.disconnect()  # here, as another thread must not close it
        except IndexError:
            connection = self._connect()
            connection.generation = number
        return connection

    def _put_back(self, connection: Any) -> None:
        if len(self._idle) < self._most_idle:
            self._idle.append(connection)
        else:
            connection.disconnect()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().disconnect()


class _Cap:
    """Limits how many threads execute commands at a time, and lets them in by turns.

    With `threading.Semaphore`, some of many threads starve: a thread that has just left enters before those that wait.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._mutex = threading.Lock()
        self._waiting: deque[Any] = deque()  # of each thread that waits, a lock that is released when it may enter

    def enter(self, deadline: float) -> None:
        with self._mutex:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        if turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        with self._mutex:
            if turn in self._waiting:
                self._waiting.remove(turn)
                raise TimeoutError("no connection to the store was free in time")

    def leave(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
