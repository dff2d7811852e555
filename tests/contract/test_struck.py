"""Store calls that an exception of a signal handler interrupts at any time, as Celery's soft time limit may in a child."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.store.protocol import AcquireStatus, LockStore, RenewResult
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import MakeStore

MakeRequest = Callable[..., LeaseSpec]

STRIKES = 2000
SECONDS = 6.0
FEWEST = 200

# The default method uses the same signal and timer, and cannot interrupt a main thread that hangs in C.
pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    # For a new connection, redis-py looks for its version in a ZipFile, in whose finalizer a strike is lost.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Striker:
    """Raises SoftTimeLimitExceeded in the main thread at a random time after it was armed."""

    def __init__(self) -> None:
        self.armed = False

    def strike(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            raise SoftTimeLimitExceeded

    def during(self, call: Callable[[], object]) -> None:
        """Repeat a call until it is interrupted, while it connects, sends a command or reads a reply."""
        try:
            self._until_struck(call)
        except SoftTimeLimitExceeded:
            pass
        except UnboundLocalError as error:  # redis-py before 8 may replace an interrupt of `Connection.__init__`
            if not isinstance(error.__context__, SoftTimeLimitExceeded):
                raise

    def _until_struck(self, call: Callable[[], object]) -> None:
        """Repeat the call. A function of its own: in Python 3.13 an error at a loop's jump back skips an `except` around it."""
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.0012))
        while self.armed:
            call()


@pytest.fixture
def striker() -> Iterator[Striker]:
    made = Striker()
    before = signal.signal(signal.SIGALRM, made.strike)
    yield made
    made.armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@contextmanager
def renewing(store: LockStore, lease_request: LeaseSpec) -> Iterator[None]:
    """Renew this lease repeatedly in another thread, and check that each renewal succeeds."""
    over = threading.Event()
    failures: list[object] = []
    times = 0

    def renew() -> None:
        nonlocal times
        while not over.wait(0.0005):
            try:
                answers = store.renew([lease_request])
            except Exception as error:
                answers = [error]  # type: ignore[list-item]
            times += 1
            if answers != [RenewResult.RENEWED]:
                failures.append(answers)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert [] == failures[:5]
    assert times > 0


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_struck_calls(
    redis_store: MakeStore, lease_request: MakeRequest, client: Any, base: str, striker: Striker, shared: bool
) -> None:
    """After any number of interrupted calls the next call works, and no call reads the reply of another."""
    store = redis_store()
    witness = lease_request("witness", task_id="witness", ttl=600.0)  # nobody renews it alone
    assert store.acquire(witness).status is AcquireStatus.GRANTED
    strikes, end = 0, time.monotonic() + SECONDS
    with renewing(store, witness) if shared else nullcontext():
        while strikes < FEWEST or (strikes < STRIKES and time.monotonic() < end):
            one = lease_request(f"d{strikes}", supervised=True)
            for _ in range(random.choice((1, 1, 2))):  # the second one during the reconnect
                striker.during(lambda: (store.acquire(one), store.release(one, success=True)))  # noqa: B023
                strikes += 1
            store_works(store, one, witness)
    store.release(witness, success=True)
    assert [] == [
        key for key in client.scan_iter(match=f"{base}*", count=1000) if not key.endswith((":fence", ":recent"))
    ]


def store_works(store: LockStore, struck: LeaseSpec, witness: LeaseSpec) -> None:
    """Check each verb with answers that differ from those of the interrupted calls."""
    holder = store.holder(witness.lock)
    assert holder is not None
    assert "witness" == holder.task_id
    assert store.acquire(struck).status is AcquireStatus.GRANTED
    assert [RenewResult.RENEWED, RenewResult.MISSING] == store.renew(
        [struck, LeaseSpec(witness.base, "nobody's", "t", 30.0)]
    )
    assert not store.release(struck, success=False).redelivery_waits
    assert store.holder(struck.lock) is None
