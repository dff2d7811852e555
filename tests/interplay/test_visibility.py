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
    """A visibility timeout that is shorter than a policy's delays but the first, of which none may be longer than half of it."""
    return {"broker_transport_options": {"visibility_timeout": 8}}


def test_long_postponement(env: WorkerEnvironment) -> None:
    """A duplicate whose policy's delay is longer than the visibility timeout stays one message."""
    env.hold("retry_default")  # its first delays are 5, 10 and 20 s
    duplicate = env.job("retry_default").delay(env.tag)
    until(lambda: len(again(env, duplicate)) >= 5, "it has waited for longer than the visibility timeout")
    env.let_go()
    lines(env, duplicate, "succeeded")
    nothing_is_left(env, duplicate)
    assert 2 == len(env.starts())
