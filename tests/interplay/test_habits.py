"""Settings and habits of users that meet duplicates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.environment import WorkerEnvironment
from tests.interplay.cases import CASES

#: Settings of workers that each kind of duplicate meets.
HABITS: dict[str, dict[str, Any]] = {
    "late acknowledgement": {
        "task_acks_late": True,
        "task_acks_on_failure_or_timeout": False,
        "task_reject_on_worker_lost": True,
        "worker_deduplicate_successful_tasks": True,
    },
    "no results": {"result_backend": "disabled://"},
    "ignored results": {"task_ignore_result": True},
    "short visibility timeout": {"broker_transport_options": {"visibility_timeout": 8}},
    "priorities": {
        "broker_transport_options": {"priority_steps": [0, 3, 6, 9], "queue_order_strategy": "priority"},
        "task_default_priority": 6,
    },
    "priority queue": {"task_queue_max_priority": 10, "task_default_priority": 7},
}


@pytest.fixture(scope="module", params=HABITS)
def habit(request: pytest.FixtureRequest) -> str:
    """The name of a habit."""
    return str(request.param)


@pytest.fixture(scope="module")
def broker_kind(habit: str) -> str:
    """Where the habit counts."""
    return "rabbitmq" if habit == "priority queue" else "redis"


@pytest.fixture(scope="module")
def extra_conf(habit: str) -> dict[str, Any]:
    """Its settings."""
    return HABITS[habit]


@pytest.mark.parametrize("case", CASES)
def test_duplicate(env: WorkerEnvironment, habit: str, case: str) -> None:
    """As `tests.interplay.cases` says of it."""
    CASES[case](env)
