"""The next message in line starts in its holder's worker without the broker, where that worker may start it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest
import redis
from celery import VERSION

from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.monitor import Monitor
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.overlap.test_line import HOLDS_BRIEFLY, assert_one_at_a_time, enqueue, in_line, order
from tests.servers import until

pytestmark = pytest.mark.long

StartWorker = Callable[..., LocalWorkerNode]
#: Seconds of a soft shutdown. What starts meanwhile is started neither by its end nor by a copy, which comes after a minute.
SOFT = 55.0


def lose_connections(env: WorkerEnvironment, node: LocalWorkerNode) -> None:
    """Have the broker close all connections of a worker's main process."""
    main = psutil.Process(node.container.process.pid)
    ports = [one.laddr.port for one in main.net_connections("tcp")]
    with redis.Redis.from_url(env.app.conf.broker_url) as client:
        lost = [one["id"] for one in client.client_list() if int(one["addr"].rpartition(":")[2]) in ports]
        assert lost
        for connection in lost:
            client.client_kill_filter(_id=connection)


@pytest.fixture
def broker(env: WorkerEnvironment) -> Iterator[Monitor]:
    """Yield what clients send to the broker."""
    with Monitor(env.app.conf.broker_url) as monitor:
        yield monitor


def published(monitor: Monitor, queue: str) -> int:
    """Return how many messages were published to a queue by now."""
    return sum(line.startswith(f"LPUSH {queue} ") for line in monitor.so_far())


def let_go(env: WorkerEnvironment, monitor: Monitor, queue: str, waiting: Sequence[object]) -> int:
    """Let the holder end, and wait until all have run; return how many messages were published meanwhile."""
    before = published(monitor, queue)
    env.let_go()
    # Celery may take 5 s to start a process in place of one that has ended.
    until(lambda: len(env.events("end")) == 1 + len(waiting), "all have run", 60)
    return published(monitor, queue) - before


@pytest.mark.parametrize(("kind", "expected"), [("prefork", 0), ("threads", 5), ("gevent", 5)])
def test_each_pool(
    env: WorkerEnvironment, broker: Monitor, fresh_worker: StartWorker, kind: str, expected: int
) -> None:
    """In prefork nothing is published; other pools have no such way."""
    queue = str(fresh_worker(WorkerSpec(kind, 2)).worker_queue)
    first = env.hold("wait_long", queue=queue)
    waiting = enqueue(env, "wait_long", 5, queue=queue)
    assert expected == let_go(env, broker, queue, waiting)
    assert [first.id, *(one.id for one in waiting)] == order(env)
    assert_one_at_a_time(env)
    assert "done" == env.get(waiting[-1])


def test_late_acknowledgement(env: WorkerEnvironment, broker: Monitor, fresh_worker: StartWorker) -> None:
    """With `acks_late` each message is published: else the broker could not deliver it again if the worker dies."""
    queue = str(fresh_worker(WorkerSpec("prefork", 2)).worker_queue)
    env.hold("wait_late", queue=queue)
    waiting = enqueue(env, "wait_late", 3, queue=queue)
    assert 3 == let_go(env, broker, queue, waiting)


def test_busy_worker(env: WorkerEnvironment, broker: Monitor, fresh_worker: StartWorker) -> None:
    """While other messages wait in the worker for a process, the next one in line is published: another worker may be free."""
    node = fresh_worker(WorkerSpec("prefork", 2))
    queue, tags = str(node.worker_queue), [env.other_tag(letter) for letter in "abc"]
    env.hold("wait_long", queue=queue)
    (waiting,) = enqueue(env, "wait_long", 1, queue=queue)
    env.hold("plain", tags[0], queue=queue)
    for tag in tags[1:]:
        blocking = env.job("plain").apply_async((tag, "hold"), queue=queue)
        node.wait_for_lines("received", blocking.id)
    before = published(broker, queue)
    env.let_go()
    until(lambda: published(broker, queue) == before + 1, "it is published")
    env.let_all_go()
    assert "done" == env.get(waiting)


def test_queue_of_another_worker(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """A message whose queue the worker does not consume is started by one that does."""
    nodes = [fresh_worker(WorkerSpec("prefork", 2)) for _ in range(2)]
    env.hold("wait_long", queue=nodes[0].worker_queue)
    elsewhere, here = (enqueue(env, "wait_long", 1, queue=node.worker_queue)[0] for node in reversed(nodes))
    env.let_go()
    assert ["done", "done"] == [env.get(elsewhere), env.get(here)]
    assert nodes[1].wait_for_lines("succeeded", elsewhere.id)
    assert nodes[0].wait_for_lines("succeeded", here.id)


def test_cancelled_consumer(env: WorkerEnvironment, broker: Monitor, fresh_worker: StartWorker) -> None:
    """A worker that was told to consume a queue no more starts none of its messages."""
    node, other = fresh_worker(WorkerSpec("prefork", 2)), fresh_worker(WorkerSpec("prefork", 2))
    queue = str(node.worker_queue)
    env.hold("wait_long", queue=queue)
    (waiting,) = enqueue(env, "wait_long", 1, queue=queue)
    env.app.control.cancel_consumer(queue, destination=[node.hostname()])
    consumed = env.app.control.inspect([node.hostname()]).active_queues
    until(lambda: consumed() == {node.hostname(): []}, "it consumes the queue no more")
    env.app.control.add_consumer(queue, destination=[other.hostname()], reply=True)
    env.let_go()
    assert "done" == env.get(waiting)
    assert other.wait_for_lines("succeeded", waiting.id)


def test_warm_shutdown(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """A body that ends while its worker stops has the next message published, for another worker."""
    nodes = [fresh_worker(WorkerSpec("prefork", 2)) for _ in range(2)]
    queue = str(nodes[0].worker_queue)
    env.hold("wait_long", queue=queue)
    waiting = enqueue(env, "wait_long", 2, queue=queue)
    name = nodes[0].hostname()
    active = env.app.control.inspect([name], timeout=10.0).active
    # Celery before 5.7 may hang if it is told to stop just while it reads the result of a task that raised.
    until(lambda: 1 == len((active() or {name: ()})[name]), "it has read the results of those that wait")
    nodes[0].kill(signal.SIGTERM)
    nodes[0].wait_for_lines("Warm shutdown")
    env.app.control.add_consumer(queue, destination=[nodes[1].hostname()], reply=True)
    env.let_go()
    assert ["done", "done"] == [env.get(result) for result in waiting]
    assert all(nodes[1].wait_for_lines("succeeded", result.id) for result in waiting)
    assert 0 == nodes[0].container.wait_for_end(SOON)


@pytest.mark.skipif(VERSION < (5, 5), reason="Celery 5.5 brought soft shutdowns")
def test_soft_shutdown(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """While a soft shutdown blocks the worker's main process, another worker starts the next message at once."""
    soft = {"worker_soft_shutdown_timeout": SOFT}
    node, other = fresh_worker(WorkerSpec("prefork", 2, conf=soft)), fresh_worker(WorkerSpec("prefork", 2))
    queue, long = str(node.worker_queue), env.other_tag("long")
    env.hold("wait_long", queue=queue)
    waiting = enqueue(env, "wait_long", 2, queue=queue)
    env.hold("plain", long, queue=queue)
    env.app.control.add_consumer(queue, destination=[other.hostname()], reply=True)
    node.kill(signal.SIGQUIT)
    node.wait_for_lines("Initiating Soft Shutdown")
    env.let_go()
    assert ["done", "done"] == [env.get(result, SOFT - 10) for result in waiting]
    assert other.wait_for_lines("succeeded", waiting[0].id)


def test_lost_connection(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """After a worker has lost its connection to the broker and got a new one, it starts messages as before."""
    node = fresh_worker(WorkerSpec("prefork", 2))
    queue = str(node.worker_queue)
    env.hold("wait_long", queue=queue)
    waiting = enqueue(env, "wait_long", 3, queue=queue)
    lose_connections(env, node)
    node.wait_for_lines("Connected to", count=2)
    node.ready()
    with Monitor(env.app.conf.broker_url) as monitor:
        assert 0 == let_go(env, monitor, queue, waiting)


def test_new_processes(env: WorkerEnvironment, broker: Monitor, fresh_worker: StartWorker) -> None:
    """Processes that take the place of others have the same way."""
    node = fresh_worker(WorkerSpec("prefork", 2, options=("--max-tasks-per-child", "1")))
    queue = str(node.worker_queue)
    env.hold("wait_long", queue=queue)
    waiting = enqueue(env, "wait_long", 4, queue=queue)
    assert 0 == let_go(env, broker, queue, waiting)
    assert 5 == len({start["pid"] for start in env.starts()})


def test_frozen_main_process(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """A message that was handed to a main process that dies then is started by its delayed copy."""
    node, other = fresh_worker(WorkerSpec("prefork", 1)), fresh_worker(WorkerSpec("prefork", 2))
    env.hold("wait", queue=node.worker_queue, **HOLDS_BRIEFLY)
    (waiting,) = enqueue(env, "wait", 1, queue=other.worker_queue)
    assert 1 == in_line(env, "wait")
    node.kill(signal.SIGSTOP)
    env.let_go()
    env.wait_for("end")
    until(lambda: env.lock_signals(env.key("wait"), "lock_released"), "the lock is released")
    node.kill()
    assert "done" == env.get(waiting)
