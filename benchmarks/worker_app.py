"""The app of the workers that benchmarks start: the last body of a batch tells how long all took."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

from celery import Celery
from redis import Connection, Redis

from benchmarks.gates import DONE, OPEN, REACHED
from benchmarks.least import Least
from benchmarks.raw import RawSocket
from benchmarks.tasks import CONNECTION, LEAST, WIRE, add_tasks, declare_floor, make_app

app: Celery = make_app(os.environ["BENCHMARKS_BROKER"], os.environ["BENCHMARKS_STORE"])
client = Redis.from_url(os.environ["BENCHMARKS_BROKER"], socket_timeout=None)  # redis-py 8 would stop waiting at a gate


class Batch:
    """Counts the bodies of one batch in this process."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.size = 0
        self._count = count(1)
        self._begin = self._cpu = 0.0

    def open(self, size: int) -> None:
        """From now on so many bodies are timed."""
        self.size = size
        self._begin, self._cpu = time.perf_counter(), time.process_time()
        self.opened.set()

    def arrived(self) -> None:
        """A body is done; the last one tells what all took."""
        if next(self._count) == self.size:
            took = time.perf_counter() - self._begin, time.process_time() - self._cpu
            client.rpush(DONE, json.dumps(took))


batch = Batch()


@app.task(name="benchmarks.gate")
def gate(size: int, first: bool) -> None:
    """Keep a place of the pool busy while a batch is published; the first gate waits for the word that opens all."""
    global batch
    if first:
        batch = Batch()
    client.rpush(REACHED, 1)
    if first:
        client.blpop([OPEN])
        batch.open(size)
    else:
        while batch.opened.is_set():  # the batch before: the first gate is still to come
            time.sleep(0.001)
        batch.opened.wait()


def body(number: int, account: str, seconds: float = 1.0) -> None:
    """Do nothing, or wait."""
    if seconds:
        time.sleep(seconds)
    batch.arrived()


def _port() -> int:
    return int(os.environ["BENCHMARKS_STORE"].rpartition(":")[2].partition("/")[0])


@cache
def _commands() -> list[list[str]]:
    """What one lock cycle of the library sends."""
    return json.loads(os.environ["BENCHMARKS_COMMANDS"])  # type: ignore[no-any-return]


@cache
def least() -> Least:
    """What takes locks with the least Python, over a connection of this process's own."""
    return Least(_port(), _commands())


@cache
def exchange() -> Callable[[], None]:
    """What sends the commands of a lock cycle, over a connection of this process's own."""
    return RawSocket(_port()).all_of(_commands())


def over_the_wire(number: int, account: str, seconds: float = 1.0) -> None:
    """Do nothing, between two commands over a raw socket."""
    exchange()()
    batch.arrived()


@cache
def connection() -> Any:
    """A connection of redis-py's, of this process's own."""
    return Connection(port=_port(), socket_timeout=1.0)


def over_redis_py(number: int, account: str, seconds: float = 1.0) -> None:
    """Do nothing, between two commands over a connection of redis-py, without its client."""
    for command in _commands():
        connection().send_command(*command)
        connection().read_response()
    batch.arrived()


def with_least(self: Any, number: int, account: str, seconds: float = 1.0) -> None:
    """Do nothing, under a lock that takes the least Python."""
    held = least().acquire(self.request.id, (number, account, seconds))
    least().release(*held)
    batch.arrived()


declare_floor(app, WIRE, over_the_wire)
declare_floor(app, CONNECTION, over_redis_py)
declare_floor(app, LEAST, with_least, bind=True)
add_tasks(app, body)
