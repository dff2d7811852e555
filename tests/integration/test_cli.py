"""`celery singleton` and `celery inspect singleton_locks`, with real workers: who holds a lock, and how to release it.

The command's app knows neither tasks nor modules of tasks.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import Holder, locks
from celery_singleton_lock.store.protocol import AcquireStatus, LeaseRequest
from celery_singleton_lock.store.redis import RedisStore, connector
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.servers import free_port, until

APP = """
from celery import Celery
from celery.bin.base import CeleryOption

app = Celery("bare", broker={broker!r}, changes={{"singleton_lock_url": {store!r}}})
app.user_options["preload"].add(CeleryOption(["--colour"]))
"""
one_pool = pytest.mark.parametrize("pool", ["threads"], indirect=True)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    return [WorkerSpec(pool, concurrency=2)]


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def command(directory: Path, *words: str, broker: str, store: str, **variables: str) -> Any:
    """Run `celery -A bare` with an app that knows these servers."""
    (directory / "bare.py").write_text(APP.format(broker=broker, store=store))
    paths = [str(directory), *filter(None, sys.path)]
    # Bytecode of an app that was written in the same second, for other servers, would be taken for this one's.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    line = [sys.executable, "-m", "celery", "-A", "bare", *words]
    return subprocess.run(line, cwd=directory, env=env, capture_output=True, text=True, timeout=30)


@pytest.fixture
def celery(env: WorkerEnvironment, tmp_path: Path) -> Run:
    """Run a command of `celery` for the servers of the environment."""
    conf = env.app.conf
    store = conf.get("singleton_lock_url") or conf.broker_url
    return lambda *words, **more: command(tmp_path, *words, **{"broker": conf.broker_url, "store": store, **more})


def leave_lock(env: WorkerEnvironment, node: str, task_id: str = "vanished") -> str:
    """Acquire a job's lock as a body of this node would that nobody knows any more; return its key."""
    key = env.key()
    base, _, digest = key.rpartition(":lock:")
    url = env.app.conf.get("singleton_lock_url") or env.app.conf.broker_url
    wanted = LeaseRequest(base, digest, secrets.token_hex(16), 60.0, task_id, node, 4711)
    assert AcquireStatus.GRANTED is RedisStore(connector(url, {})).acquire(wanted).status
    return key


# -- show --------------------------------------------------------------------------------------


def test_show(env: WorkerEnvironment, celery: Run) -> None:
    """The holder is named, as a sentence or as JSON; the exit status tells whether there is one."""
    result = env.hold()
    text = celery("singleton", "show", env.key())
    assert text.stdout.startswith(f"held by task {result.id} on {env.worker.hostname()} (pid ")
    as_json = celery("singleton", "show", "--json", env.key())
    assert Holder(**json.loads(as_json.stdout)).task_id == result.id
    assert (0, 0) == (text.returncode, as_json.returncode)
    env.let_go()
    env.get(result)
    assert (1, "free\n") == ((free := celery("singleton", "show", env.key())).returncode, free.stdout)
    assert "null\n" == celery("singleton", "show", "--json", env.key()).stdout


# -- release -----------------------------------------------------------------------------------


def test_running_body(env: WorkerEnvironment, celery: Run) -> None:
    """While the worker runs the task, its lock is not released."""
    result = env.hold()
    for more in ([], ["--dry-run"]):
        done = celery("singleton", "release", env.key(), *more)
        assert (1, "") == (done.returncode, done.stderr)
        assert done.stdout.startswith(f"refused: {env.worker.hostname()} runs this task; held by task {result.id} ")
    assert env.is_locked()
    assert [] == env.lock_signals(env.key(), "lock_lost")


def test_force(env: WorkerEnvironment, celery: Run) -> None:
    """With --force it is released, the holder is told, and the next one may start."""
    key = env.key("skip_short")
    first = env.hold("skip_short")
    done = celery("singleton", "release", key, "--force")
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(f"released: {env.worker.hostname()} runs this task; held by task {first.id} ")
    until(lambda: env.lock_signals(key, "lock_lost"), "the holder is told")
    assert "done" == env.get(env.job("skip_short").delay(env.tag)), "the next one runs while the first one goes on"
    env.let_go()
    assert "held" == env.get(first)


def test_body_that_its_worker_does_not_know(env: WorkerEnvironment, celery: Run) -> None:
    """If the worker does not run the task, its lock is released; a dry run only says so."""
    key = leave_lock(env, env.worker.hostname())
    would = celery("singleton", "release", key, "--dry-run")
    assert would.stdout.startswith(f"would be released: {env.worker.hostname()} does not run this task; held by ")
    assert (1, True) == (would.returncode, env.is_locked())
    done = json.loads(celery("singleton", "release", key, "--json").stdout)
    assert ("released", "unknown", "vanished") == (done["outcome"], done["answer"], done["holder"]["task_id"])
    assert not env.is_locked()
    assert (1, "free: nobody held it\n") == ((free := celery("singleton", "release", key)).returncode, free.stdout)


@one_pool
def test_worker_that_does_not_answer(env: WorkerEnvironment, celery: Run) -> None:
    """If the worker does not answer, the command says when the lock expires, and releases it with --force alone."""
    key = leave_lock(env, "gone@local")
    done = celery("singleton", "release", key)
    assert done.stdout.startswith("refused: gone@local did not answer; held by task vanished on gone@local ")
    assert ", expires in " in done.stdout
    assert (1, True) == (done.returncode, env.is_locked())
    assert "released: gone@local did not answer; " in celery("singleton", "release", key, "--force").stdout
    assert not env.is_locked()


@one_pool
def test_broker_away(env: WorkerEnvironment, celery: Run) -> None:
    """Without the broker no worker answers, and the command does not wait for it."""
    key = leave_lock(env, env.worker.hostname())
    before = time.monotonic()
    done = celery("singleton", "release", key, broker=f"redis://127.0.0.1:{free_port()}/0")
    assert f"refused: {env.worker.hostname()} did not answer; " in done.stdout
    assert f"{env.worker.hostname()} could not be asked: " in done.stderr
    assert time.monotonic() - before < 10
    assert 0 == celery("singleton", "release", key).returncode


@one_pool
def test_reservation(env: WorkerEnvironment, celery: Run) -> None:
    """The lock of a message that no worker has started is released without asking anybody."""
    result = env.job("publish").apply_async((env.tag,), queue=env.other_tag("nobody"))
    key = env.key("publish")
    assert f"held by task {result.id} (queued " in celery("singleton", "show", key).stdout
    done = celery("singleton", "release", key)
    assert done.stdout.startswith(f"released: no body ran (queued); held by task {result.id} ")
    assert not env.is_locked("publish")


@one_pool
def test_another_task_that_started_meanwhile(env: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock got another holder while the node was asked, that one keeps it."""
    key = leave_lock(env, env.worker.hostname())

    def answer(*_: Any) -> str:
        assert env.job("skip").force_unlock(env.tag).task_id == "vanished"  # type: ignore[attr-defined]
        leave_lock(env, env.worker.hostname(), "newcomer")
        return locks.UNKNOWN

    monkeypatch.setattr(locks, "_answer_of_node", answer)
    done = locks.release(env.app, key)
    assert ("changed", False, "vanished") == (done.outcome, done.released, done.holder and done.holder.task_id)
    assert (found := locks.show(env.app, key)) is not None
    assert "newcomer" == found.task_id
    monkeypatch.undo()
    assert locks.release(env.app, key).released


# -- inspect -----------------------------------------------------------------------------------


def test_inspect(env: WorkerEnvironment, pool: str, celery: Run) -> None:
    """Each worker names the tasks that it runs under locks, with their keys and processes."""
    result = env.hold()
    done = celery("inspect", "singleton_locks", "--json", "--destination", env.worker.hostname())
    (found,) = json.loads(done.stdout)[env.worker.hostname()]
    assert found == {
        "task": "job.skip",
        "task_id": result.id,
        "key": env.key(),
        "pid": env.starts()[0]["pid"],
        "held": None if pool == "prefork" else True,
    }
    env.let_go()
    env.get(result)
    until(lambda: not asked(env), "it names none")


def asked(env: WorkerEnvironment) -> Any:
    node = env.worker.hostname()
    (reply,) = env.app.control.broadcast("singleton_locks", destination=[node], reply=True)
    return reply[node]


# -- errors ------------------------------------------------------------------------------------


@one_pool
@pytest.mark.parametrize("verb", ["show", "release"])
def test_errors_are_one_line(env: WorkerEnvironment, celery: Run, tmp_path: Path, verb: str) -> None:
    """A wrong key, a store that is away and an app without a store are told in one line each."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    for done, said in [
        (celery("singleton", verb, "celery"), "Error: 'celery' is no key of a lock of this app"),
        (celery("singleton", verb, env.key(), store=nowhere), "Error: the store of locks: "),
        (celery("-b", "memory://", "singleton", verb, env.key(), store=None), "Error: no store for locks: "),
    ]:
        assert done.returncode == 1
        assert done.stderr.startswith(said), done.stderr
        assert 1 == len(done.stderr.splitlines()), done.stderr


@one_pool
def test_environment_is_no_option(env: WorkerEnvironment, celery: Run) -> None:
    """Variables that Kubernetes sets for a service of that name are no options; the app's own options do no harm."""
    names = ("RELEASE_FORCE", "RELEASE_DRY_RUN", "RELEASE_AS_JSON", "RELEASE_JSON", "FORCE")
    variables = {f"CELERY_SINGLETON_{name}": "tcp://10.0.0.1:9808" for name in names}
    result = env.hold()
    done = celery("singleton", "--colour", "never", "release", env.key(), **variables)
    assert (1, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(f"refused: {env.worker.hostname()} runs this task; held by task {result.id} ")
