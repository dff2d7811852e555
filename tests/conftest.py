"""What tests of every kind may ask for: servers, each started once when first asked for, and the example project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
from celery import _state
from celery.signals import task_postrun, worker_init, worker_ready

from celery_singleton_lock import signals
from tests.servers import RabbitMQServer, RedisServer, ServerMissing, rabbitmq_required


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this run; tests keep to keys of their own on it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitMQServer]:
    """A RabbitMQ of this run. Not installed: skipped locally, an error where it is required."""
    server = RabbitMQServer()
    try:
        server.start()
    except ServerMissing as missing:
        server.close()
        if rabbitmq_required():
            raise
        pytest.skip(str(missing))
    except BaseException:
        server.close()
        raise
    yield server
    server.close()


@pytest.fixture
def example() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the example project, whose receivers would note what other tests do."""
    current = _state._tls.current_app
    recording, run_log = (import_module(f"example_project.{name}") for name in ("recording", "run_log"))
    signals.duplicate.disconnect(recording.on_duplicate)
    signals.lock_lost.disconnect(recording.on_lost)
    worker_init.disconnect(recording.on_init)
    worker_ready.disconnect(recording.on_ready)
    worker_init.disconnect(run_log.on_init)
    signals.lock_acquired.disconnect(run_log.on_acquired)
    task_postrun.disconnect(run_log.on_end)
    yield lambda name: import_module(f"example_project.{name}")
    _state._tls.current_app = current
