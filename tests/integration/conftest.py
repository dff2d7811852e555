"""pytest-celery's fixtures with local processes as nodes, and the ``env`` of the tests.

A module chooses its workers by overriding ``worker_specs`` (or ``pool``), and their configuration by
overriding ``extra_conf``. No other module uses them at the same time; later ones with the same choice do.
Each test has its own tag, so that tests do not affect each other. A test that harms its worker uses
``fresh_worker``.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestSetup,
    CeleryWorkerCluster,
)

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalServer, LocalWorker, LocalWorkerNode, WorkerShelf, WorkerSpec
from tests.integration.recorder import Recorder
from tests.integration.tasks import make_app
from tests.integration.watch import NinetySeconds, Watch
from tests.lanes import Run
from tests.servers import RedisServer, until

#: Celery's pools, each of which is tested.
POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")


@pytest.fixture(scope="session")
def run_directory(run: Run) -> Path:
    """Return the directory of the workers' logs and the bodies' records."""
    return run.directory


@pytest.fixture(scope="session")
def recorder(run_directory: Path) -> Recorder:
    """Return the recorder of the bodies and signals of all workers."""
    return Recorder(run_directory)


@pytest.fixture(scope="session")
def worker_shelf(run: Run) -> WorkerShelf:
    """Return the workers of the whole run."""
    return WorkerShelf(run)


# -- fixtures that a module may override ---------------------------------------------------------


@pytest.fixture(scope="module")
def broker_kind() -> str:
    """Return the kind of broker, ``redis`` or ``rabbitmq``."""
    return "redis"


@pytest.fixture(scope="module")
def pool() -> str:
    """Return the pool of the module's only worker."""
    return "prefork"


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    """Return the module's workers; the queue of the first one is the default."""
    return (WorkerSpec(pool, concurrency=1 if pool == "solo" else 4),)


@pytest.fixture(scope="module")
def extra_conf() -> dict[str, Any]:
    """Return additional configuration for all workers of the module and the tests' app."""
    return {}


# -- pytest-celery's fixtures --------------------------------------------------------------------


@pytest.fixture(scope="module")
def celery_broker_cluster(request: pytest.FixtureRequest, broker_kind: str) -> Iterator[CeleryBrokerCluster]:
    """The run's Redis, or its RabbitMQ."""
    server = request.getfixturevalue(f"{broker_kind}_server")
    cluster = CeleryBrokerCluster(CeleryTestBroker(LocalServer(server, server.url())))  # type: ignore[arg-type]
    yield cluster
    cluster.teardown()


@pytest.fixture(scope="module")
def celery_backend_cluster(redis_server: RedisServer) -> Iterator[CeleryBackendCluster]:
    """Another database of the run's Redis."""
    node = CeleryTestBackend(LocalServer(redis_server, redis_server.url(db=1)))  # type: ignore[arg-type]
    cluster = CeleryBackendCluster(node)
    yield cluster
    cluster.teardown()


@pytest.fixture(scope="module")
def base_conf(
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    run_directory: Path,
    extra_conf: dict[str, Any],
) -> dict[str, Any]:
    """Configuration that the module's workers and the tests' app share."""
    broker_url = celery_broker_cluster[0].config()["url"]
    timeout = extra_conf.get("broker_transport_options", {}).get("visibility_timeout")
    if timeout and broker_url.startswith("redis:"):  # which counts for the messages of all workers of a database
        broker_url = f"{broker_url.rpartition('/')[0]}/{10 + timeout % 6}"
    return {
        "broker_url": broker_url,
        "result_backend": celery_backend_cluster[0].config()["url"],
        "test_directory": str(run_directory),
        "task_track_started": True,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
        "worker_hijack_root_logger": True,
        # A moment of slowness is no outage. A module that stops its store without closing it sets its own.
        "singleton_lock_store_timeout": 20.0,
        **extra_conf,
    }


@pytest.fixture(scope="module")
def local_workers(
    request: pytest.FixtureRequest,
    worker_shelf: WorkerShelf,
    worker_specs: Sequence[WorkerSpec],
    base_conf: dict[str, Any],
) -> Iterator[list[LocalWorker]]:
    """The module's worker processes, starting."""
    workers = [worker_shelf.take(spec, base_conf) for spec in worker_specs]
    yield workers
    for worker in workers:
        if "own_store" in request.fixturenames:  # no other module has it
            worker.end()
        else:
            worker_shelf.give_back(worker)


@contextlib.contextmanager
def make_setup_app(workers: Sequence[LocalWorker], conf: Mapping[str, Any]) -> Iterator[Celery]:
    """Make the app of a module's tests; its default queue is that of the first worker."""
    app = make_app({**conf, "task_default_queue": workers[0].worker_queue()})
    app.set_current()
    yield app
    forget_results(app)
    app.close()


@pytest.fixture(scope="module")
def celery_setup_app(local_workers: list[LocalWorker], base_conf: dict[str, Any]) -> Iterator[Celery]:
    """The tests' app, which publishes to the first worker unless told otherwise."""
    with make_setup_app(local_workers, base_conf) as app:
        yield app


def forget_results(app: Celery) -> None:
    """Keep results of failed tests from unsubscribing when they are collected, as the server may no longer run."""
    if hasattr(app.backend, "result_consumer"):
        app.backend.result_consumer.cancel_for = lambda task_id: None


@pytest.fixture(scope="module")
def celery_worker_cluster(local_workers: list[LocalWorker], celery_setup_app: Celery) -> Iterator[CeleryWorkerCluster]:
    """The module's workers, each of which has answered a ping."""
    cluster = CeleryWorkerCluster(*(LocalWorkerNode(worker, celery_setup_app) for worker in local_workers))
    cluster.ready()
    yield cluster
    cluster.teardown()


@pytest.fixture(scope="module")
def own_store() -> Iterator[RedisServer]:
    """Yield a store for a module whose tests stop it, read all its data, or count its commands."""
    with RedisServer() as server:
        yield server


# -- fixtures of the tests -----------------------------------------------------------------------


@pytest.fixture
def env(celery_setup: CeleryTestSetup, recorder: Recorder) -> Iterator[WorkerEnvironment]:
    """Yield the environment with a tag of this test; bodies that still wait at its end are released."""
    celery_setup.app.set_current()
    env = WorkerEnvironment(celery_setup, recorder, secrets.token_hex(6))
    yield env
    env.let_all_go()


@pytest.fixture
def fresh_worker(
    run_directory: Path, base_conf: dict[str, Any], celery_setup_app: Celery
) -> Iterator[Callable[..., LocalWorkerNode]]:
    """Yield a function that starts workers for one test, which may harm them."""
    with contextlib.ExitStack() as ends:

        def start(spec: WorkerSpec, ready: bool = True) -> LocalWorkerNode:
            worker = LocalWorker(spec, base_conf, run_directory)
            worker.start()
            ends.callback(worker.end)
            node = LocalWorkerNode(worker, celery_setup_app)
            if ready:
                node.ready()
            return node

        yield start


# -- bodies of 90 s ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ninety_seconds(
    redis_server: RedisServer, worker_shelf: WorkerShelf, run_directory: Path, recorder: Recorder
) -> NinetySeconds:
    """Return one body of 90 s in each pool, in its own worker; duplicates go to another worker."""
    conf = {
        "broker_url": redis_server.url(db=2),
        "result_backend": redis_server.url(db=2),
        "test_directory": str(run_directory),
    }
    specs = [WorkerSpec("threads", copy=9), *(WorkerSpec(pool, 1, copy=9) for pool in POOLS)]
    elsewhere, *workers = [worker_shelf.take(spec, conf) for spec in specs]
    app = make_app({**conf, "task_default_queue": elsewhere.worker_queue()})
    forget_results(app)

    def start(worker: LocalWorker) -> Watch:
        worker.wait_until_ready(app)
        tag = f"ninety-{worker.name}"
        job = app.tasks["job.skip_short"]
        options = {"lock_options": {"lock_ttl": 15}}  # much shorter than the body, and longer than a moment of slowness
        result = job.apply_async((tag, ["sleep", "return"], 90.0), queue=worker.worker_queue(), **options)
        until(lambda: recorder.events(tag, "start"), "the body starts", 30)
        return Watch(job, tag, result, recorder, redis.Redis.from_url(conf["broker_url"]))

    return NinetySeconds({w.spec.pool: functools.partial(start, w) for w in workers})
