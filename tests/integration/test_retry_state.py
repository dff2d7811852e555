"""The state RETRY of a postponed duplicate never overwrites its later state."""

from __future__ import annotations

from typing import Any

import celery
import pytest

from celery_singleton_lock import DuplicateTask
from tests.integration.environment import WorkerEnvironment
from tests.servers import RedisServer

pytestmark = pytest.mark.skipif(
    celery.VERSION < (5, 7),
    reason="Celery before 5.7 stores RETRY after the message was published; docs/how-to/rabbitmq.md says so",
)


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf(redis_server: RedisServer) -> dict[str, Any]:
    return {"result_backend": f"tests.integration.tasks:LateRetries+{redis_server.url(db=1)}"}


def test_failure_of_a_quick_copy_stays(env: WorkerEnvironment) -> None:
    """A postponed duplicate whose next delivery comes within milliseconds and fails stays in FAILURE."""
    env.hold("hasty")
    duplicate = env.job("hasty").delay(env.tag)
    assert isinstance(env.error(duplicate), DuplicateTask)
    env.finish(duplicate.id)
    assert "FAILURE" == env.app.AsyncResult(duplicate.id).state  # a new result object, because one caches its state
