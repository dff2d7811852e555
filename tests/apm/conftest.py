"""Workers and publisher with an integration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from celery import Celery

from tests.apm.integrations import Integration, installed
from tests.apm.tasks import add_tasks
from tests.integration.conftest import (  # noqa: F401 - fixtures
    base_conf,
    broker_kind,
    celery_backend_cluster,
    celery_broker_cluster,
    celery_worker_cluster,
    env,
    extra_conf,
    local_workers,
    make_setup_app,
    recorder,
    run_directory,
    worker_shelf,
)
from tests.integration.nodes import LocalWorker, WorkerSpec


@pytest.fixture(scope="session")
def integration() -> Integration:
    """The one of this environment, which ``python -m tests.apm`` has started."""
    return installed()


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    """Processes that were forked after the integration had started, and threads."""
    return str(request.param)


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    """One worker."""
    return (WorkerSpec(pool, program=("-m", "tests.apm.worker")),)


@pytest.fixture(scope="module")
def celery_setup_app(local_workers: list[LocalWorker], base_conf: dict[str, Any]) -> Iterator[Celery]:  # noqa: F811
    """The tests' app with the tasks of this directory."""
    with make_setup_app(local_workers, base_conf) as app:
        add_tasks(app)
        yield app
