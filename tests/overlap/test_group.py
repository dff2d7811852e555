"""Tasks of one group exclude each other for the same customer, and lose no work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.servers import until

TASKS = ["group.bill", "group.export"]


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec("prefork"), WorkerSpec("threads")]


@pytest.mark.parametrize(("holding", "waiting"), [TASKS, TASKS[::-1]])
@pytest.mark.parametrize("pools", [("prefork", "prefork"), ("prefork", "threads"), ("threads", "prefork")])
def test_same_customer(env: WorkerEnvironment, holding: str, waiting: str, pools: tuple[str, str]) -> None:
    """While one task works on a customer, another task of the group waits; both run in the end."""
    customer, tags = env.tag, (env.other_tag("one"), env.other_tag("two"))
    queues = [env.worker_of(pool).worker_queue for pool in pools]
    one = env.job(holding).apply_async((tags[0], customer, "hold"), queue=queues[0])
    key = env.wait_for("start", tags[0])["key"]
    two = env.job(waiting).apply_async((tags[1], customer), queue=queues[1])
    (duplicate,) = until(lambda: env.lock_signals(key, "duplicate")[:1], "a duplicate")
    assert (waiting, two.id, one.id) == (duplicate["task"], duplicate["task_id"], duplicate["holder"])
    assert [] == env.starts(tags[1])
    env.let_go(tags[0])
    assert ("held", "done") == (env.get(one), env.get(two))
    assert [key] == [start["key"] for start in env.starts(tags[1])]
    assert env.events("end", tags[0])[0]["at"] < env.starts(tags[1])[0]["at"]


def test_other_customers(env: WorkerEnvironment) -> None:
    """Tasks of a group that work on different customers run at the same time."""
    tags = [env.other_tag(name) for name in ("one", "two", "three")]
    for tag, name, customer in zip(tags, [*TASKS, TASKS[0]], ("a", "b", "c"), strict=True):
        env.job(name).apply_async((tag, f"{env.tag}-{customer}", "hold"))
    starts = [env.wait_for("start", tag) for tag in tags]
    assert all(start["held"] for start in starts)
    assert 3 == len({start["key"] for start in starts})
    assert [] == [end for tag in tags for end in env.events("end", tag)]
