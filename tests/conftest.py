"""How a run is divided among its processes, and what tests of every kind may ask for.

That is servers, each started once in the whole run when first asked for, and the example project.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from celery import _state
from celery.signals import task_postrun, worker_init, worker_ready

from celery_singleton_lock import signals
from tests.integration.nodes import LocalWorker
from tests.lanes import Run
from tests.servers import RabbitMQServer, RedisServer, ServerMissing, new_directory, rabbitmq_required, warden
from tests.stacks import last_minute, stacks_of
from tests.timeouts import is_timeout

#: Variable of the environment with the directory of the run.
RUN_DIRECTORY = "SINGLETON_TEST_RUN"

#: The rows of the fault matrix.
MATRIX = Path(__file__).parent / "faults" / "matrix"

RUN = pytest.StashKey[Run]()


# -- lanes ---------------------------------------------------------------------------------------


def is_lane(config: pytest.Config) -> bool:
    """Tell whether another process has started this run (pytest-xdist)."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory of the run, or use that of the process that has started the run."""
    if not is_lane(config):
        os.environ[RUN_DIRECTORY] = str(new_directory("run"))
    config.stash[RUN] = Run(Path(os.environ[RUN_DIRECTORY]))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End whatever the run has started."""
    if not is_lane(config):
        warden.end()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which tests one lane runs one after the other; those that measure time come last."""
    items.sort(key=_turn)
    if is_lane(config):
        with config.stash[RUN].shared("groups") as groups:
            groups.update({item.nodeid: _group(item) for item in items})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have pytest-xdist divide the tests by these groups, in their order."""
    from xdist.scheduler import LoadScopeScheduling  # a run without -n does without it

    groups: dict[str, str] = {}

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not groups:  # all lanes have collected their tests
                with config.stash[RUN].shared("groups") as found:
                    groups.update(found)
            return groups[nodeid]

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def _group(item: pytest.Item) -> str:
    """Return the name of the tests that run one after the other in one lane."""
    if item.get_closest_marker("timed"):
        return "timed"
    if MATRIX in item.path.parents:  # each row has servers and workers of its own
        return item.name
    callspec = getattr(item, "callspec", None)
    scopes = callspec._arg2scope if callspec else {}
    shared = [str(callspec.params[name]) for name, scope in scopes.items() if scope.value != "function"]
    return "-".join([item.nodeid.partition("::")[0], *shared])


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("timed"):
        return 2
    return 0 if item.get_closest_marker("long") else 1


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tell the other lanes that this one runs tests."""
    if is_lane(session.config):
        session.config.stash[RUN].begin()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the other lanes that this one has run its tests."""
    session.config.stash[RUN].end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that measures time wait for all other lanes; that is no part of its own time."""
    if item.get_closest_marker("timed"):
        item.config.stash[RUN].wait_until_alone()
    return (yield)


# -- reports -------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, object, pytest.TestReport]:
    """Show where the workers of a test hang that waited in vain, and what they logged last."""
    report = yield
    if call.excinfo is not None and is_timeout(call.excinfo.value):
        for worker in LocalWorker.in_use:
            logged = last_minute(worker.logs())  # before it also contains the stacks
            report.sections.append((f"stacks of {worker.name}", stacks_of(worker.process)))
            report.sections.append((f"last minute of {worker.name}", logged))
    return report


# -- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def run(pytestconfig: pytest.Config) -> Run:
    """What the processes of this run share."""
    return pytestconfig.stash[RUN]


@pytest.fixture(scope="session")
def redis_server(run: Run) -> RedisServer:
    """A Redis of this run; tests keep to keys of their own on it."""
    return run.server(RedisServer)


@pytest.fixture(scope="session")
def rabbitmq_server(run: Run) -> RabbitMQServer:
    """A RabbitMQ of this run. Not installed: skipped locally, an error where it is required."""
    try:
        return run.server(RabbitMQServer)
    except ServerMissing as missing:
        if rabbitmq_required():
            raise
        pytest.skip(str(missing))


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


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    """Collects what the signal `duplicate` is sent with in this process."""
    seen: list[dict[str, Any]] = []

    def receive(**given: Any) -> None:
        seen.append(given)

    signals.duplicate.connect(receive)
    yield seen
    signals.duplicate.disconnect(receive)
