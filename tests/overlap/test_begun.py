"""A message that is delivered again because its worker died: whether its body had begun decides if it is a duplicate."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import kombu
import pytest
from celery.result import AsyncResult

from celery_singleton_lock import Join, Policy, Raise, Replace, RunOnceMore, Skip, Wait
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import until

pytestmark = pytest.mark.long

StartWorker = Callable[..., LocalWorkerNode]
#: Seconds after which the lease of a killed worker has expired.
TTL = 2
#: Seconds within which a message of a dead worker is delivered again. On Redis, Kombu before 5.7 looks for such messages ten
#: seconds after a worker's start, unless another worker looks in that moment, and then each 100 s.
REDELIVERED = 60.0 if kombu.VERSION >= (5, 7) else 200.0


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Return each broker that delivers again what a dead worker has not acknowledged."""
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf(redis_server: Any) -> dict[str, Any]:
    """Have Redis deliver again soon."""
    return {"broker_transport_options": delivering_again_after(3), "singleton_lock_url": redis_server.url()}


def delivering_again_after(seconds: int) -> dict[str, int]:
    """Return the options of a Redis broker that delivers messages of dead workers again about so many seconds later."""
    # A worker that is killed while it looks for such messages keeps others from it until the mutex expires.
    looking = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1, "unacked_mutex_expire": 2}
    return {"visibility_timeout": seconds, **looking}


def killed(
    env: WorkerEnvironment, fresh_worker: StartWorker, name: str, acts: list[str], policy: Policy | None, busy: bool
) -> tuple[AsyncResult, str]:
    """Kill a worker that has begun a job, or that has received it while it was busy; return the job's result and queue."""
    options: dict[str, Any] = {"lock_ttl": TTL, **({"on_duplicate": policy} if policy else {})}
    node = fresh_worker(WorkerSpec("prefork", 1, conf={"worker_prefetch_multiplier": 4}))
    job, queue = env.job(name), str(node.worker_queue)
    if busy:
        env.hold("comes_back", env.other_tag("busy"), queue=queue, lock_options={"lock_ttl": TTL})
    result = job.apply_async((env.tag,), {"acts": acts}, queue=queue, lock_options=options)
    if busy:
        node.wait_for_lines("received", result.id)
    else:
        env.wait_for("start")
    node.kill(signal.SIGKILL)
    return result, queue


def meet(env: WorkerEnvironment, fresh_worker: StartWorker, name: str, result: AsyncResult, queue: str) -> None:
    """Let another message hold the lock when the one of a killed worker comes again, and end once they have met."""
    until(lambda: not env.is_locked(name), "the lease has expired")
    env.hold(name, acts="hold", lock_options={"lock_ttl": 60})
    fresh_worker(WorkerSpec("prefork", 2, options=("-Q", queue)))
    until(
        lambda: [one for one in env.lock_signals(env.key(name), "duplicate") if one["task_id"] == result.id],
        "it meets the holder",
        REDELIVERED,
    )


@pytest.mark.parametrize(
    "policy", [Skip(), Skip(own_retries=True), Raise(), RunOnceMore(), Join(), Replace(grace=600), Wait()], ids=repr
)
def test_begun(env: WorkerEnvironment, fresh_worker: StartWorker, policy: Policy) -> None:
    """A message whose first delivery died in its body runs after the duplicate that got the lock meanwhile, under each policy."""
    result, queue = killed(env, fresh_worker, "comes_back", ["hold", "hold", "return"], policy, busy=False)
    meet(env, fresh_worker, "comes_back", result, queue)
    env.let_go()
    assert "done" == env.get(result)
    assert result.id == env.starts()[-1]["id"]


def test_begun_with_the_lock_from_publish(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """The same, if the messages are published with their lock."""
    name = "publish_comes_back"
    result, queue = killed(env, fresh_worker, name, ["hold", "hold", "return"], None, busy=False)
    meet(env, fresh_worker, name, result, queue)
    env.let_go()
    assert "done" == env.get(result)


def test_not_begun(env: WorkerEnvironment, fresh_worker: StartWorker) -> None:
    """A message that its worker had received, and not begun, is a duplicate like any other when it is delivered again."""
    result, queue = killed(env, fresh_worker, "comes_back", ["hold"], None, busy=True)
    meet(env, fresh_worker, "comes_back", result, queue)
    assert env.get(result) is None
    assert result.id not in [start["id"] for start in env.starts()]
