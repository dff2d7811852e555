"""Workers that are killed at random moments while many messages wait in line: each message runs, one at a time."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import states

from celery_singleton_lock import locks
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.overlap.test_begun import delivering_again_after
from tests.overlap.test_line import assert_no_overlap, in_line, order
from tests.servers import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

MESSAGES, KILLS, WORKERS = 400, 10, 3


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf(redis_server: Any) -> dict[str, Any]:
    """Have Redis deliver again soon, and the store keep the runs of a whole test."""
    return {
        "broker_transport_options": delivering_again_after(6),
        "singleton_lock_url": redis_server.url(),
        "singleton_lock_history": MESSAGES * 2,
    }


@pytest.mark.parametrize("round_", range(5))
def test_workers_killed(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], round_: int) -> None:
    """With early acknowledgement, each message starts, though its body may be killed; nothing is left but what expires.

    A worker may be killed between the grant of the lock and the first line of the body. Celery has acknowledged the message by
    then, so it has started like any message whose worker is killed. The history of the store tells that it was granted its lock.
    """
    generator = random.Random(seed := secrets.token_hex(4))
    print(f"seed {seed}")
    name, queue, sent = "wait_brief", env.other_tag("queue"), []

    def start() -> LocalWorkerNode:
        node = fresh_worker(WorkerSpec("prefork", 2))
        env.app.control.add_consumer(queue, destination=[node.hostname()], reply=True)
        return node

    nodes = [start() for _ in range(WORKERS)]
    env.hold(name, lock_options={"lock_ttl": 60})
    for _ in range(MESSAGES):
        sent.append(env.job(name).apply_async((env.tag, "sleep", 0.1), queue=queue))
    until(lambda: in_line(env, name) == MESSAGES, "all wait", timeout=120)
    env.let_go()
    for _ in range(KILLS):
        time.sleep(generator.uniform(0.5, 4.0))
        nodes.pop(generator.randrange(WORKERS)).kill()
        nodes.append(start())
    unstarted = {result.id for result in sent}

    def all_started() -> bool:
        unstarted.difference_update(order(env))
        if unstarted:
            unstarted.difference_update(run.task_id for run in locks.history(env.app, f"job.{name}"))
        return not unstarted

    until(all_started, "each starts", timeout=600, every=0.5)
    until(lambda: not env.is_locked(name), "the last one has ended")
    assert 0 == in_line(env, name)
    assert MESSAGES - KILLS <= sum(result.state == states.SUCCESS for result in sent)
    assert_no_overlap(env)
    bodies = [event["what"] for event in env.events() if event["what"] in ("start", "end")]
    assert KILLS >= sum(pair == ("start", "start") for pair in itertools.pairwise(bodies))
