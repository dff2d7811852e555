"""The fault matrix runs only on request (``pytest tests/faults/matrix``); an ordinary run has the checker's tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import MATRIX, RUN
from tests.faults.harness import FIGURES
from tests.servers import RabbitMQServer

#: Pools whose rows run each night, if the same test has a row for another pool, which runs in each check.
NIGHTLY = {"gevent", "eventlet", "solo"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the matrix unless the command line names this directory or a path in it."""
    asked = any("faults" in str(argument) for argument in config.invocation_params.args)
    return True if collection_path.name == "matrix" and not asked else None


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark the rows of the other pools, so that ``-m "not nightly"`` leaves them out."""
    rows = [item for item in items if MATRIX in item.path.parents]
    each_check = {item.function for item in rows if not _is_of_another_pool(item)}
    for item in rows:
        if _is_of_another_pool(item) and item.function in each_check:
            item.add_marker(pytest.mark.nightly)


def _is_of_another_pool(item: pytest.Function) -> bool:
    return hasattr(item, "callspec") and not NIGHTLY.isdisjoint(map(str, item.callspec.params.values()))


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> str | RabbitMQServer:
    """Yield each kind of broker: ``redis`` (the env starts its own) or a RabbitMQ server."""
    return "redis" if request.param == "redis" else request.getfixturevalue("rabbitmq_server")


def _figures(config: pytest.Config) -> Path:
    return config.stash[RUN].directory / "figures.jsonl"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the figures of this process to the one that prints them all."""
    with _figures(session.config).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in FIGURES)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print each bound with its measured value."""
    rows = [json.loads(line) for line in _figures(config).read_text().splitlines()]
    if rows:
        terminalreporter.section("bounds and figures")
    for what, bound, measured in sorted(rows, key=lambda row: (int(row[0].split()[0]), row[0])):
        terminalreporter.line(f"{what:<78} bound {bound:>12}   measured {measured:>8}")
