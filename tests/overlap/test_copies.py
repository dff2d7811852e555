"""Delayed copies of messages in line are handled beside the pool of the worker that has received them, in each pool."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kombu
import psutil
import pytest

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.overlap.test_line import BEFORE_A_COPY, assert_no_overlap, enqueue, order
from tests.servers import until

pytestmark = pytest.mark.long

StartWorker = Callable[..., LocalWorkerNode]
#: Places of a worker that asks for messages at once: at its prefetch limit, it may do so up to 2 s after a body has ended.
SIZES = {"gevent": 10, "threads": 1 if kombu.VERSION >= (5, 7) else 10}


def at_night(*pools: str) -> list[Any]:
    """Return these pools as parameters of tests that a check leaves out: it runs prefork and threads."""
    return [pytest.param(pool, marks=pytest.mark.nightly) for pool in pools]


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Return each broker."""
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf(redis_server: Any) -> dict[str, Any]:
    """Have the locks in Redis with each broker."""
    return {"singleton_lock_url": redis_server.url()}


@pytest.mark.parametrize("kind", ["prefork", "threads", *at_night("gevent", "eventlet", "solo")])
@pytest.mark.parametrize("name", ["wait_brief", "wait_late"])
def test_busy_pool(env: WorkerEnvironment, fresh_worker: StartWorker, kind: str, name: str) -> None:
    """The copies of a worker whose pool is busy start the messages of a holder that was killed, in another worker."""
    holder, busy = fresh_worker(WorkerSpec("prefork", 1)), fresh_worker(WorkerSpec(kind, 1))
    queue, long = str(busy.worker_queue), env.other_tag("long")
    env.hold(name, queue=holder.worker_queue)
    waiting = enqueue(env, name, 3, queue=queue)  # so only this worker has their copies
    env.hold("plain", long, queue=queue)
    fetched = env.job("plain").apply_async((env.other_tag("fetched"), "return"), queue=queue)
    if kind != "solo":  # which receives nothing while it runs a body
        busy.wait_for_lines("received", fetched.id)  # so it fetches no more
    env.app.control.add_consumer(queue, destination=[env.worker.hostname()], reply=True)
    holder.kill()
    assert ["done"] * 3 == [env.get(result, BEFORE_A_COPY) for result in waiting]
    assert [] == env.events("end", long)
    assert [result.id for result in waiting] == order(env)[1:]
    assert_no_overlap(env)


@pytest.mark.parametrize("kind", ["prefork", "threads", *at_night("gevent")])
@pytest.mark.parametrize("name", ["wait_long", "wait_late"])
def test_message_for_a_busy_worker(env: WorkerEnvironment, fresh_worker: StartWorker, kind: str, name: str) -> None:
    """A worker whose pool is busy keeps no message whose turn has come: it starts at once, where a process is free."""
    joining, free, *busy = [fresh_worker(WorkerSpec(kind, size)) for size in (2, SIZES.get(kind, 1), 1, 1)]
    queue, options = str(joining.worker_queue), {"lock_options": {"lock_ttl": 60}}
    for node in busy:
        env.hold("plain", env.other_tag(node.hostname()), queue=node.worker_queue)
    env.hold(name, queue=free.worker_queue, **options)
    waiting = enqueue(env, name, 5, queue=queue, **options)
    env.app.control.cancel_consumer(queue, destination=[joining.hostname()], reply=True)
    for node in (free, *busy):
        env.app.control.add_consumer(queue, destination=[node.hostname()])
        node.wait_for_lines("Started consuming from", queue)
    env.let_go()
    until(lambda: len(env.events("end")) == 6, "all have run", BEFORE_A_COPY)
    gaps = [start["at"] - end["at"] for end, start in zip(env.events("end"), env.starts()[1:], strict=False)]
    assert max(gaps[1:]) < 10  # on a slow machine; with Redis, a worker may wait for up to 1 s at its former queues
    assert [result.id for result in waiting] == order(env)[1:]


def test_killed_children(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """No message is lost, however many processes of the pool are killed while its copies are due."""
    node = fresh_worker(WorkerSpec("prefork", 2))
    queue = str(node.worker_queue)
    env.hold("wait_short_ttl", lock_options={"lock_ttl": 60})
    waiting = enqueue(env, "wait_short_ttl", 10, queue=queue, time_limit=20)
    for result in waiting:  # a process that is killed while it still has the message fails it
        node.wait_for_lines(result.id, "ignored")
    end = time.monotonic() + 8
    while time.monotonic() < end:
        for child in psutil.Process(node.container.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    env.let_go()
    assert ["done"] * 10 == [env.get(result) for result in waiting]
    until(lambda: not env.is_locked("wait_short_ttl"), "the lock is free")
    assert_no_overlap(env)
