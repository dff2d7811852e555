"""The fault matrix runs only on request (``pytest tests/faults``); an ordinary run has the checker's tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults.harness import FIGURES
from tests.servers import RabbitMQServer


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the matrix unless the command line names this directory or a path in it."""
    asked = any("faults" in str(argument) for argument in config.invocation_params.args)
    return True if collection_path.name == "matrix" and not asked else None


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> str | RabbitMQServer:
    """Yield each kind of broker: ``redis`` (the env starts its own) or a RabbitMQ server."""
    return "redis" if request.param == "redis" else request.getfixturevalue("rabbitmq_server")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each bound with its measured value."""
    if FIGURES:
        terminalreporter.section("bounds and figures")
        for what, bound, measured in FIGURES:
            terminalreporter.line(f"{what:<78} bound {bound:>12}   measured {measured:>8}")
    if os.environ.get("FAULTS_FIGURES"):
        with Path(os.environ["FAULTS_FIGURES"]).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in FIGURES)
