"""What all benchmarks of a run share: a broker, a store of locks, and an app with a task of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.raw import RawSocket
from benchmarks.tasks import (
    CONNECTION,
    LEAST,
    OURS,
    SCALARS,
    WIRE,
    add_tasks,
    declare,
    declare_floor,
    ignored,
    make_app,
    nothing,
)
from benchmarks.tracer import around_body
from tests.integration.monitor import Monitor
from tests.servers import RedisServer


@dataclass
class Stage:
    """Servers of the run's own, and how thoroughly it measures.

    Arguments:
        broker: for messages.
        store: for locks; nobody else talks to it.
        quick: measure less, to see that everything works.
    """

    broker: RedisServer
    store: RedisServer
    quick: bool = False

    def __post_init__(self) -> None:
        #: Numbers for arguments, so that no call is another's duplicate by chance.
        self.numbers = count(1)

    def few(self, default: int, quick: int) -> int:
        """How many rounds or repeats."""
        return quick if self.quick else default

    @cached_property
    def app(self) -> Celery:
        """The app of this process."""
        return make_app(self.broker.url(), self.store.url())

    @cached_property
    def tasks(self) -> dict[str, Any]:
        """A task of each kind, with a body that does nothing."""
        return add_tasks(self.app, nothing)

    @cached_property
    def ignoring(self) -> Any:
        """A task without a lock that ends as a duplicate does."""
        return declare(self.app, "ignored", None, ignored)

    @cached_property
    def floors(self) -> dict[str, Any]:
        """The tasks of workers that stand for floors."""
        return {kind: declare_floor(self.app, kind, nothing) for kind in (WIRE, CONNECTION, LEAST)}

    def commands(self, supervised: bool = False) -> list[list[str]]:
        """What one lock cycle of the library sends; `supervised`: in a prefork child."""
        cycle = partial(around_body, self.tasks[OURS], SCALARS, supervised)
        cycle()  # makes plan, connection and scripts
        return self.sent(cycle)

    @cached_property
    def client(self) -> Any:
        """A client of the store."""
        return Redis.from_url(self.store.url())

    @cached_property
    def broker_client(self) -> Any:
        """A client of the broker."""
        return Redis.from_url(self.broker.url())

    def socket(self) -> RawSocket:
        """A plain socket to the store."""
        return RawSocket(self.store.port)

    def sent(self, call: Callable[[], object]) -> list[list[str]]:
        """The commands that a call sends to the store, without what scripts do there."""
        with Monitor(self.store.url()) as monitor:
            call()
        return [command.split(" ") for command in monitor.commands]

    def clear(self) -> None:
        """Empty both servers."""
        self.client.flushall()
        self.broker_client.flushall()
        self.client.config_resetstat()


@contextmanager
def stage(quick: bool = False) -> Iterator[Stage]:
    """Start the servers of a run, and end them with it."""
    with RedisServer() as broker, RedisServer() as store:
        made = Stage(broker, store, quick)
        try:
            yield made
        finally:
            made.app.close()
