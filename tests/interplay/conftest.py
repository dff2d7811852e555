"""Workers of all pools at all kinds of brokers; each worker ends with the tests that it was started for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery
from pytest_celery import CeleryWorkerCluster

from tests.integration.conftest import (  # noqa: F401 - fixtures
    base_conf,
    broker_kind,
    celery_backend_cluster,
    celery_broker_cluster,
    env,
    extra_conf,
    make_setup_app,
    pool,
    recorder,
    run_directory,
)
from tests.integration.nodes import LocalWorker, LocalWorkerNode, WorkerSpec, start_workers
from tests.interplay.worker_app import arrange_queues
from tests.servers import RabbitMQServer, RedisServer, new_directory, remove_directory, until

#: Celery delays messages of RabbitMQ's quorum queues natively from this version on.
HAS_QUORUM_QUEUES = celery.VERSION >= (5, 5)

#: Configuration of quorum queues, as Celery's documentation has it.
QUORUM = {
    "task_default_queue_type": "quorum",
    "task_default_exchange_type": "topic",
    "broker_native_delayed_delivery_queue_type": "quorum",
    "broker_transport_options": {"confirm_publish": True},
}


@dataclasses.dataclass(frozen=True)
class Directory:
    """A broker that is a directory: messages are its files, or rows of a database in it."""

    scheme: str
    path: Path

    def url(self) -> str:
        """Return the URL."""
        return "filesystem://" if self.scheme == "filesystem" else f"sqla+sqlite:///{self.path}/messages.sqlite"


def _directory(scheme: str) -> Iterator[Directory]:
    path = new_directory(scheme)
    yield Directory(scheme, path)
    remove_directory(path)


@pytest.fixture(scope="session")
def filesystem_server() -> Iterator[Directory]:
    """A directory of messages."""
    yield from _directory("filesystem")


@pytest.fixture(scope="session")
def sqlite_server() -> Iterator[Directory]:
    """A database of messages."""
    yield from _directory("sqlite")


@pytest.fixture(scope="session")
def quorum_server(rabbitmq_server: RabbitMQServer) -> RabbitMQServer:
    """The run's RabbitMQ."""
    return rabbitmq_server


def own_conf(kind: str, server: RedisServer | RabbitMQServer | Directory) -> dict[str, Any]:
    """Return what a kind of broker wants to be configured, besides its URL."""
    if kind == "quorum":
        return QUORUM
    if kind == "filesystem":
        folders = {"data_folder_in": f"{server.path}", "data_folder_out": f"{server.path}"}
        return {"broker_transport_options": {**folders, "control_folder": f"{server.path}/control"}}
    return {}


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:  # noqa: F811
    """One worker."""
    return (WorkerSpec(pool, concurrency=3),)


@pytest.fixture(scope="module")
def local_workers(
    worker_specs: Sequence[WorkerSpec],
    base_conf: dict[str, Any],  # noqa: F811
    run_directory: Path,  # noqa: F811
) -> Iterator[list[LocalWorker]]:
    """The workers of a module and its parameters."""
    program = ("-m", "celery", "-A", "tests.interplay.worker_app")
    specs = [dataclasses.replace(spec, program=program) for spec in worker_specs]
    workers = start_workers(specs, base_conf, run_directory)
    yield workers
    for worker in workers:
        worker.end()


@pytest.fixture(scope="module")
def celery_setup_app(local_workers: list[LocalWorker], base_conf: dict[str, Any]) -> Iterator[Celery]:  # noqa: F811
    """The tests' app, with the queues that the workers have."""
    with make_setup_app(local_workers, base_conf) as app:
        arrange_queues(app)
        yield app


@pytest.fixture(scope="module")
def celery_worker_cluster(local_workers: list[LocalWorker], celery_setup_app: Celery) -> Iterator[CeleryWorkerCluster]:
    """The workers, each of which has told its log that it is ready; not every broker carries a ping."""
    cluster = CeleryWorkerCluster(*(LocalWorkerNode(worker, celery_setup_app) for worker in local_workers))
    for worker in local_workers:
        until(lambda worker=worker: " ready." in worker.logs() or not worker.process.running, "ready", 100)
        assert worker.process.running, worker.logs()[-4000:]
    yield cluster
    cluster.teardown()
