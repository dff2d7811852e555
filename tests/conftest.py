"""Servers that tests of every kind may ask for; each is started once, when first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
