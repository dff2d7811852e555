"""What Redis delivers again because it was not acknowledged in time is not multiplied by postponements."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.environment import WorkerEnvironment
from tests.interplay.cases import again, lines, nothing_is_left
from tests.servers import until


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    """The pool."""
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    """A visibility timeout that is shorter than a policy's delay."""
    return {"broker_transport_options": {"visibility_timeout": 2}}


def test_long_postponement(env: WorkerEnvironment) -> None:
    """A duplicate whose policy's delay is longer than the visibility timeout stays one message."""
    env.hold("retry_default")  # its first delay is 5 s
    duplicate = env.job("retry_default").delay(env.tag)
    until(lambda: len(again(env, duplicate)) >= 12, "several rounds of what the broker restores", 30)
    env.let_go()
    lines(env, duplicate, "succeeded")
    nothing_is_left(env, duplicate)
    assert 2 == len(env.starts())
