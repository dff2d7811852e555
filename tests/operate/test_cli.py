"""`celery singleton` and `celery inspect singleton_locks`, with real workers: what locks do, and how to release and pause them.

The command's app knows no task, and importing its modules of tasks would fail.
"""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import VERSION, Celery
from click.testing import CliRunner, Result

from celery_singleton_lock import locks
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.context import context_of
from celery_singleton_lock.keys.canonical import escaped
from celery_singleton_lock.locks import releasing
from celery_singleton_lock.store.keys import queued_token
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.tasks import Boom
from tests.servers import RedisServer, free_port, until

pytestmark = pytest.mark.long

APP = """
from celery import Celery
from celery.bin.base import CeleryOption

app = Celery("bare", broker={broker!r}, changes={{"singleton_lock_url": {store!r}}}, include=["no_such_module"])
app.user_options["preload"].add(CeleryOption(["--colour"]))
"""
one_pool = pytest.mark.parametrize("pool", ["threads"], indirect=True)
prefork = pytest.mark.parametrize("pool", ["prefork"], indirect=True)
knows_commands_of_others = pytest.mark.skipif(
    VERSION[:2] < (5, 4), reason="`celery inspect` has a fixed list of commands before 5.4"
)
#: Seconds in which an interpreter starts and ends.
LATE = 100
Run = Callable[..., subprocess.CompletedProcess[str]]
Quick = Callable[..., Result]


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    return [WorkerSpec(pool, concurrency=2)]


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    """Locks of their own: others must neither be listed nor held by an operator."""
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture
def empty_store() -> Iterator[RedisServer]:
    """A store that no worker knows."""
    with RedisServer() as server:
        yield server


def command(directory: Path, *words: str, **more: str) -> Any:
    """Run `celery -A bare` with an app that knows these servers, and with more variables of the environment."""
    line, env = line_of(directory, *words, **more)
    return subprocess.run(line, cwd=directory, env=env, capture_output=True, text=True, timeout=LATE)


def line_of(
    directory: Path, *words: str, broker: str, store: str, **variables: str
) -> tuple[list[str], dict[str, str]]:
    """Return a command line and its environment."""
    (directory / "bare.py").write_text(APP.format(broker=broker, store=store))
    paths = [str(directory), *filter(None, sys.path)]
    # Bytecode of an app that was written in the same second, for other servers, would be taken for this one's.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return [sys.executable, "-m", "celery", "-A", "bare", *words], env


@pytest.fixture
def celery(env: WorkerEnvironment, tmp_path: Path) -> Run:
    """Run a command of `celery` for the servers of the environment."""
    return lambda *words, **more: command(tmp_path, *words, **{**servers_of(env), **more})


@pytest.fixture
def quick(env: WorkerEnvironment) -> Quick:
    """Run a command of `celery singleton` in this process, as Celery does, without the start of an interpreter."""

    def run(*words: str, store: str = "", **variables: str) -> Result:
        changes = {"singleton_lock_url": store}
        app = Celery("quick", broker="memory://", set_as_current=False, changes=changes) if store else env.app
        more: dict[str, Any] = {"env": variables, "auto_envvar_prefix": "CELERY_SINGLETON"}
        return CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=app), **more)

    return run


def servers_of(env: WorkerEnvironment) -> dict[str, str]:
    conf = env.app.conf
    return {"broker": conf.broker_url, "store": conf.get("singleton_lock_url") or conf.broker_url}


def leave_lock(
    env: WorkerEnvironment,
    node: str,
    task_id: str = "vanished",
    name: str = "skip",
    tag: str = "",
    limit: int = 0,
    history: int | None = 100,
) -> str:
    """Acquire a job's lock as a body of this node would that nobody knows any more; return its lock key."""
    key = env.key(name, tag or None)
    base, _, digest = key.rpartition(":lock:")
    spec = LeaseSpec(base, digest, secrets.token_hex(16), 3600.0, task_id, node, 4711, limit=limit)
    store = RedisStore(connector(servers_of(env)["store"], {}), history=history)
    assert AcquireStatus.GRANTED is store.acquire(spec).status
    return key


def answered(env: WorkerEnvironment, celery: Run, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that asks the worker and does nothing if that is silent; do so again until it answers in its second."""

    def run() -> subprocess.CompletedProcess[str] | None:
        done = celery(*words)
        silent = f"{env.worker.hostname()} did not answer", '"answer": "silent"'
        return None if any(word in done.stdout for word in silent) else done

    return until(run, "the worker answers in time")  # type: ignore[return-value]


def row(done: subprocess.CompletedProcess[str], key: str) -> dict[str, str]:
    """Return the cells of the row of this lock, by their heads."""
    head, *rows = done.stdout.splitlines()
    (found,) = [one for one in rows if key in one.split()]
    return dict(zip(head.split(), found.split(), strict=True))


# -- list --------------------------------------------------------------------------------------


@prefork
def test_list(env: WorkerEnvironment, celery: Run) -> None:
    """Each lock has a whole line, however narrow the terminal is, with its holder, its duplicates, and messages in line."""
    key, started = env.key("wait_long"), time.monotonic()
    result = env.hold("wait_long")
    env.job("wait_long").delay(env.tag)
    until(lambda: 1 == locks.show(env.app, key)[0].waiting, "one waits")
    found = row(done := celery("singleton", "list", COLUMNS="40"), key)
    assert ("job.wait_long", "running", result.id, key) == (
        found["TASK"],
        found["STATE"],
        found["TASK-ID"],
        found["KEY"],
    )
    assert ("1", "1", env.worker.hostname()) == (found["DUPLICATES"], found["WAITING"], found["NODE"])
    assert (0, "") == (done.returncode, done.stderr)
    (lock,) = [one for one in json.loads(celery("singleton", "list", "--json").stdout) if one["key"] == key]
    assert (result.id, env.starts()[0]["pid"], 1) == (lock["holder"]["task_id"], lock["holder"]["pid"], lock["waiting"])
    assert 0 < lock["holder"]["age"] < time.monotonic() - started
    assert 0 < lock["holder"]["remaining"] <= 60


@one_pool
def test_filters_and_order(env: WorkerEnvironment, quick: Quick) -> None:
    """Locks are chosen by task, node and age, and sorted by a column."""
    tags = [env.other_tag(letter) for letter in "ab"]
    keys = [leave_lock(env, f"{env.tag}@a", name="skip_value", tag=tags[0])]
    # The pages of the registry are read one after the other: of two locks as old, the younger may seem older.
    until(lambda: locks.show(env.app, keys[0])[0].holder.age >= 1.0, "the first one is older by a second")
    keys += [leave_lock(env, f"{env.tag}@b", name="skip_value", tag=tags[1])]

    def listed(*words: str) -> list[str]:
        return [one["key"] for one in json.loads(quick("list", "--json", *words).output) if one["key"] in keys]

    assert keys == listed() == listed("--task", "job.skip_value") == listed("--sort", "node")
    assert keys[::-1] == listed("--sort", "ttl"), "the newest expires last"
    assert keys[1:] == listed("--node", f"{env.tag}@b")
    assert [] == listed("--task", "job.skip") == listed("--min-age", "1h")
    nobody = quick("list", "--node", "nobody")
    assert (1, True) == (nobody.exit_code, "no locks on node nobody; nodes with locks: " in nobody.output)


@one_pool
def test_unknown_task(quick: Quick) -> None:
    """A name that no worker has registered, and that has no lock, is probably misspelt: an error says so."""
    for words in (["list", "--task", "job.skp"], ["stats", "--task", "job.skp"], ["history", "job.skp"]):
        done = quick(*words)
        assert (3, "Error: no worker has registered a task or lock group 'job.skp'\n") == (done.exit_code, done.output)


@prefork
def test_killed_worker(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], celery: Run, tmp_path: Path
) -> None:
    """The locks of a dead worker are listed, told to expire, released with --force, and are in the history."""
    node = fresh_worker(WorkerSpec("prefork", 1))
    result = env.hold("long", queue=node.worker_queue)
    node.kill()
    assert env.key("long") == row(celery("singleton", "list", "--node", node.hostname()), env.key("long"))["KEY"]
    refused = celery("singleton", "release", "--node", node.hostname())
    assert refused.stdout.startswith(
        f"{env.key('long')} refused: {node.hostname()} did not answer; held by task {result.id} "
    )
    assert (1, True) == (refused.returncode, ", expires in " in refused.stdout)
    done = celery("singleton", "release", "--node", node.hostname(), "--force", "--json")
    assert [(0, "released", env.key("long"))] == [
        (done.returncode, one["outcome"], one["key"]) for one in json.loads(done.stdout)
    ]
    found = row(celery("singleton", "history", env.key("long")), env.key("long"))
    assert ("released_by_operator", result.id, node.hostname()) == (found["OUTCOME"], found["TASK-ID"], found["NODE"])


# -- show --------------------------------------------------------------------------------------


def test_show(env: WorkerEnvironment, celery: Run) -> None:
    """The holder is named, as a sentence or as JSON; the exit status tells whether there is one."""
    result = env.hold()
    text = celery("singleton", "show", env.key())
    assert text.stdout.startswith(f"held by task {result.id} on {env.worker.hostname()} (pid ")
    as_json = celery("singleton", "show", "--json", env.key())
    assert [(env.key(), result.id)] == [(one["key"], one["holder"]["task_id"]) for one in json.loads(as_json.stdout)]
    by_id = celery("singleton", "show", result.id)
    assert by_id.stdout.startswith(f"{env.key()} is held by task {result.id} on ")
    assert (0, 0) == (text.returncode, as_json.returncode)
    env.let_go()
    env.get(result)
    assert (1, "free\n") == ((free := celery("singleton", "show", env.key())).returncode, free.stdout)
    assert "[]\n" == celery("singleton", "show", "--json", env.key()).stdout
    assert (
        f"no lock is held by a task {result.id}; one that waits has none yet\n"
        == celery("singleton", "show", result.id).stdout
    )


@one_pool
def test_show_several_holders(env: WorkerEnvironment, celery: Run) -> None:
    """With a `lock_limit`, all holders of the lock are shown, by the key that `lock_key_for()` makes."""
    key = env.key("limit_skip")
    first, second = env.hold("limit_skip", acts="hold"), env.hold("limit_skip", acts="hold")
    shown = celery("singleton", "show", key).stdout.splitlines()
    assert [f"held by task {first.id} on", f"{key}:1 is held by task {second.id} on"] == [
        line.partition(" on")[0] + " on" for line in shown
    ]


# -- stats and history -------------------------------------------------------------------------


@prefork
def test_stats_and_history(env: WorkerEnvironment, celery: Run) -> None:
    """Counters and runs tell what became of tasks, with their errors."""
    before = locks.stats(env.app, "job.skip_value")[0]
    env.get(env.job("skip_value").delay(env.tag))
    failed = env.job("skip_value").delay(env.tag, "raise")
    assert isinstance(env.error(failed), Boom)
    (now,) = json.loads(celery("singleton", "stats", "--task", "job.skip_value", "--json").stdout)
    env.hold("skip", tag=env.other_tag("held"))
    (held,) = json.loads(celery("singleton", "stats", "--task", "job.skip", "--json").stdout)
    assert 1 <= held["states"]["running"]
    grown = {name: count - before.counters.get(name, 0) for name, count in now["counters"].items()}
    assert (2, 1, 1) == (grown["acquired"], grown["released:success"], grown["released:failure"])
    text = celery("singleton", "stats", "--task", "job.skip_value").stdout
    assert ["acquired", str(now["counters"]["acquired"])] in [line.split() for line in text.splitlines()]
    (line,) = [line for line in celery("singleton", "stats").stdout.splitlines() if line.startswith("job.skip_value ")]
    assert str(now["counters"]["acquired"]) == line.split()[2]

    newest, earlier = json.loads(celery("singleton", "history", "job.skip_value", "--json").stdout)[:2]
    assert ("failure", failed.id, "success") == (newest["outcome"], newest["task_id"], earlier["outcome"])
    lines = celery("singleton", "history", env.key("skip_value")).stdout.splitlines()
    assert 3 == len(lines)
    assert "Boom" in lines[1]


@one_pool
def test_task_whose_name_looks_like_a_key(env: WorkerEnvironment, quick: Quick) -> None:
    """Its history is found by its name, and by its key."""
    name = f"a:lock:{env.tag}"
    base = f"singleton:{{{escaped(name)}}}"
    store = RedisStore(connector(servers_of(env)["store"], {}), history=100)
    spec = LeaseSpec(base, "1" * 32, secrets.token_hex(16), 60.0, "t1", "n", 1)
    store.acquire(spec)
    store.release(spec, True)
    for word in (name, spec.lock):
        assert "t1" in quick("history", word).output, word


# -- release -----------------------------------------------------------------------------------


def test_running_body(env: WorkerEnvironment, celery: Run) -> None:
    """While the worker runs the task, its lock is not released."""
    result = env.hold()
    for more in ([], ["--dry-run"]):
        done = answered(env, celery, "singleton", "release", env.key(), *more)
        assert (1, "") == (done.returncode, done.stderr)
        assert done.stdout.startswith(f"refused: {env.worker.hostname()} runs this task; held by task {result.id} ")
    assert env.is_locked()
    assert [] == env.lock_signals(env.key(), "lock_lost")


def test_two_workers_with_one_name(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """A lock is not released as long as one of the workers that have the holder's node name runs the task."""
    env.hold()
    other = fresh_worker(WorkerSpec("solo", 1, ("--hostname", env.worker.hostname())), ready=False)
    until(lambda: " ready." in other.logs(), "the other worker is ready")
    answers = [locks.release(env.app, env.key(), dry_run=True) for _ in range(8)]
    assert {"refused"} == {answer.outcome for answer in answers}


def test_force(env: WorkerEnvironment, celery: Run) -> None:
    """With --force it is released, the holder is told, and the next one may start."""
    key = env.key("skip_short")
    first = env.hold("skip_short", lock_options={"lock_ttl": 9})
    done = celery("singleton", "release", key, "--force")
    assert (0, "") == (done.returncode, done.stderr)
    said = rf"released: {env.worker.hostname()} (runs this task|did not answer); held by task {first.id} "
    assert re.match(said, done.stdout), done.stdout
    until(lambda: env.lock_signals(key, "lock_lost"), "the holder is told")
    assert "done" == env.get(env.job("skip_short").delay(env.tag)), "the next one runs while the first one goes on"
    env.let_go()
    assert "held" == env.get(first)


def test_body_that_its_worker_does_not_know(env: WorkerEnvironment, celery: Run) -> None:
    """If the worker does not run the task, its lock is released; a dry run only says so."""
    key = leave_lock(env, env.worker.hostname())
    would = answered(env, celery, "singleton", "release", key, "--dry-run")
    assert would.stdout.startswith(f"would be released: {env.worker.hostname()} does not run this task; held by ")
    assert (1, True) == (would.returncode, env.is_locked())
    done = json.loads(answered(env, celery, "singleton", "release", key, "--json").stdout)
    assert ("released", "unknown", "vanished") == (done["outcome"], done["answer"], done["holder"]["task_id"])
    assert not env.is_locked()
    assert (1, "free: nobody held it\n") == ((free := celery("singleton", "release", key)).returncode, free.stdout)


@prefork
@pytest.mark.parametrize(("age", "outcome"), [(0.0, "refused"), (60.0, "released")])
def test_redelivery_that_waits(env: WorkerEnvironment, age: float, outcome: str) -> None:
    """A message that its worker has only received does not run, unless its process may have begun it just now."""
    for number in range(2):
        env.hold("plain", tag=env.other_tag(f"busy{number}"), acts="hold")
    env.job("skip").apply_async((env.tag,), task_id=(redelivered := f"redelivered-{env.tag}"))
    until(lambda: [redelivered] == [one["task_id"] for one in asked(env)], "it is received")
    key = leave_lock(env, env.worker.hostname(), redelivered)
    base, (lock,) = key.rpartition(":lock:")[0], locks.show(env.app, key)
    (answer,) = releasing.answers_of(env.app, [lock.holder._replace(age=age)], SOON)
    spec = releasing.ReleaseReport("", key, lock.holder, answer)
    assert outcome == releasing.revoke(context_of(env.app).store, base, spec, False, False).outcome
    locks.release(env.app, key, force=True)  # else the message would wait in the worker beside the next tests
    env.let_all_go()
    env.finish(redelivered)


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
    """Without the broker no worker is asked, and the command does not wait for one."""
    key = leave_lock(env, env.worker.hostname())
    done = celery("singleton", "release", key, broker=f"redis://127.0.0.1:{free_port()}/0")
    assert "refused: the broker could not be reached, so " in done.stdout
    assert f"{env.worker.hostname()} could not be asked: " in done.stderr
    assert 0 == answered(env, celery, "singleton", "release", key).returncode


@one_pool
def test_reservation(env: WorkerEnvironment, celery: Run) -> None:
    """The lock of a message that no worker has started is released without asking anybody."""
    result = env.job("publish").apply_async((env.tag,), queue=env.other_tag("nobody"))
    key = env.key("publish")
    assert f"held by task {result.id} (queued " in celery("singleton", "show", key).stdout
    done = celery("singleton", "release", key, broker=f"redis://127.0.0.1:{free_port()}/0")
    assert done.stdout.startswith(f"released: no body ran (queued); held by task {result.id} ")
    assert "could not be asked" not in done.stderr
    assert not env.is_locked("publish")


@prefork
def test_worker_that_answers_late(env: WorkerEnvironment) -> None:
    """A worker that does not answer at once is asked again, and its answer is not waited for any longer than it takes."""
    env.hold("skip")
    main = env.worker.container.process.pid
    os.kill(main, signal.SIGSTOP)
    waking = threading.Timer(1.5, os.kill, (main, signal.SIGCONT))
    waking.start()
    began = time.monotonic()
    answered = locks.release(env.app, env.key("skip"), timeout=SOON)
    waking.join()
    assert ("refused", "running") == (answered.outcome, answered.answer)
    assert time.monotonic() - began < SOON / 2


@one_pool
def test_another_task_that_started_meanwhile(env: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock got another holder while the node was asked, that one keeps it."""
    key = leave_lock(env, env.worker.hostname())

    def answer(*_: Any) -> Any:
        assert env.job("skip").force_unlock(env.tag).task_id == "vanished"  # type: ignore[attr-defined]
        leave_lock(env, env.worker.hostname(), "newcomer")
        return {env.worker.hostname(): set()}

    monkeypatch.setattr(releasing, "_tasks_of_nodes", answer)
    done = locks.release(env.app, key)
    assert ("changed", False, "vanished") == (done.outcome, done.released, done.holder and done.holder.task_id)
    assert ["newcomer"] == [lock.holder.task_id for lock in locks.show(env.app, key)]
    monkeypatch.undo()
    assert locks.release(env.app, key, timeout=SOON).released


@prefork
def test_release_all_of_a_task(env: WorkerEnvironment, celery: Run) -> None:
    """Of several locks of a task, those are released whose workers do not run it. One line for each tells the answer."""
    running = env.hold("raise_object")
    tags = [env.other_tag(letter) for letter in "ab"]
    lost = [leave_lock(env, env.worker.hostname(), f"lost-{tag}", "raise_object", tag) for tag in tags]
    silent = leave_lock(env, "gone@local", "silent", "raise_object", env.other_tag("c"))
    words = ["singleton", "release", "--task", "job.raise_object"]
    would = answered(env, celery, *words, "--dry-run")
    assert (1, 4) == (would.returncode, len(would.stdout.splitlines()))
    done = answered(env, celery, *words)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert (1, {env.key("raise_object"), *lost, silent}) == (done.returncode, set(told))
    assert all(told[key].startswith(f"released: {env.worker.hostname()} does not run this task") for key in lost)
    assert told[silent].startswith("refused: gone@local did not answer; ")
    assert told[env.key("raise_object")].startswith(
        f"refused: {env.worker.hostname()} runs this task; held by task {running.id}"
    )
    assert {env.key("raise_object"), silent} == {lock.key for lock in locks.find(env.app, "job.raise_object")}
    locks.release_all(env.app, node="nobody", task="job.raise_object", force=True)
    locks.release_all(env.app, node="gone@local", task="job.raise_object", force=True)
    assert [env.key("raise_object")] == [lock.key for lock in locks.find(env.app, "job.raise_object")]
    none = celery(*words, "--node", "gone@local")
    assert (1, True) == (none.returncode, none.stderr.startswith("no locks on node gone@local; nodes with locks: "))


# -- pause -------------------------------------------------------------------------------------


@prefork
def test_pause_of_task(env: WorkerEnvironment, celery: Run) -> None:
    """While a task is paused, bodies that run go on and no other one starts; the commands tell of the pause."""
    first, other = env.hold("callable"), env.other_tag("other")
    done = celery("singleton", "pause", "--task", "job.callable", "--for", "2h")
    try:
        assert done.stdout.startswith("job.callable is paused for 2h, until ")
        assert done.stdout.endswith("; bodies that still run: 1\n")
        assert None is env.get(env.job("callable").delay(other)), "skipped, as the holder has no task id"
        key = env.key("callable", other)
        shown, listed = celery("singleton", "show", key), celery("singleton", "list", "--task", "job.callable")
        assert "held by an operator's pause (by " in shown.stdout
        found = row(listed, key.rpartition(":")[0] + ":*")
        assert ("paused", "1h59m", locks.this_user()) == (found["STATE"], found["TTL"], found["NODE"])
        resumed = celery("singleton", "resume", key)
        whole = key.rpartition(":")[0] + ":*"
        assert f"{key} was not paused\nbut its whole task is: {whole}\n" == resumed.stdout
        free = celery("singleton", "release", key)
        assert (1, True) == (
            free.returncode,
            free.stdout.startswith("free: nobody held it\nbut held by an operator's pause "),
        )
        (pause,) = json.loads(celery("singleton", "release", key, "--json").stdout)["others"]
        assert ("paused", key.rpartition(":")[0] + ":*") == (pause["holder"]["state"], pause["key"])
    finally:
        ended = celery("singleton", "resume", "--task", "job.callable")
    assert (0, "job.callable is not paused any more\n") == (ended.returncode, ended.stdout)
    assert "done" == env.get(env.job("callable").delay(other))
    env.let_go()
    assert "held" == env.get(first)
    none = celery("singleton", "resume", "--task", "job.callable", "--json")
    assert (1, False) == (none.returncode, json.loads(none.stdout)["ended"])


@one_pool
def test_pause_of_key(env: WorkerEnvironment, quick: Quick) -> None:
    """A pause of one key leaves the other lock keys of the task alone, and ends by itself."""
    before = time.time()
    held = quick("pause", env.key(), "--for", "1h", "--json")
    told = json.loads(held.output)
    assert before + 3599 < told.pop("until") < time.time() + 3601
    named = {"by": locks.this_user(), "reason": ""}
    assert {"key": env.key(), "task": "job.skip", "seconds": 3600.0, "running": 0, **named} == told
    assert None is env.get(env.job("skip").delay(env.tag))
    assert "done" == env.get(env.job("skip").delay(env.other_tag("other")))
    assert 0 == quick("resume", env.key()).exit_code
    assert "done" == env.get(env.job("skip").delay(env.tag))
    quick("pause", env.key(), "--for", "0.2s")
    until(lambda: not locks.show(env.app, env.key()), "it ends")
    assert "done" == env.get(env.job("skip").delay(env.tag))


@one_pool
def test_pause_of_slot(env: WorkerEnvironment, quick: Quick) -> None:
    """The key of a slot stands for all slots of its lock, and the command says so."""
    key, result = env.key("limit_skip"), env.hold("limit_skip")
    held = quick("pause", f"{key}:1", "--for", "1m")
    try:
        assert held.output.startswith(f"{key} is paused for 1m, until ")
        assert held.output.endswith("; bodies that still run: 1\n")
        assert key == json.loads(quick("pause", f"{key}:1", "--for", "1m", "--json").output)["key"]
        assert None is env.get(env.job("limit_skip").delay(env.tag)), "no slot is free"
    finally:
        assert 0 == quick("resume", f"{key}:1").exit_code
    env.let_go()
    assert "held" == env.get(result)


# -- watch -------------------------------------------------------------------------------------


class Watcher:
    """A running `watch`, which writes to a pipe or to a terminal."""

    def __init__(self, env: WorkerEnvironment, directory: Path, *words: str, term: str = "", **servers: str) -> None:
        line, variables = line_of(
            directory, "singleton", "watch", "--every", "0.2", *words, **{**servers_of(env), **servers}, TERM=term
        )
        self._end, write = pty.openpty() if term else os.pipe()
        # A shell has its background jobs, and so the tests, ignore Ctrl-C.
        heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(
            line, cwd=directory, env=variables, stdout=write, stderr=subprocess.STDOUT, preexec_fn=heeding
        )
        os.close(write)
        self.text = ""

    def read_until(self, words: str, count: int = 1) -> str:
        """Read until these words have come so often."""
        deadline = time.monotonic() + LATE
        while self.text.count(words) < count:
            assert time.monotonic() < deadline, self.text
            self.text += os.read(self._end, 65536).decode()
        return self.text

    def interrupt(self) -> int:
        """Do as Ctrl-C, and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(LATE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def watcher(env: WorkerEnvironment, tmp_path: Path) -> Iterator[Callable[..., Watcher]]:
    """Start watchers that end with the test."""
    with ExitStack() as ends:

        def start(*words: str, **more: str) -> Watcher:
            found = Watcher(env, tmp_path, *words, **more)
            ends.callback(found.close)
            return found

        yield start


@one_pool
@pytest.mark.parametrize("term", ["", "dumb", "xterm"])
def test_watch(env: WorkerEnvironment, watcher: Callable[..., Watcher], term: str) -> None:
    """The table comes again and again, with whole keys, until Ctrl-C. Only a capable terminal is cleared."""
    node = f"gone@{env.tag}"
    key = leave_lock(env, node)
    watch = watcher("--task", "job.skip", "--node", node, "--min-age", "0", term=term)
    text = watch.read_until(f"vanished  {key}", 3)
    assert (term == "xterm") is ("\x1b[H" in text)
    assert "locks: 1 running" in text
    assert 0 == watch.interrupt()


@one_pool
@pytest.mark.parametrize("words", [(), ("--task", "job.skip")])
def test_watch_survives_the_store(watcher: Callable[..., Watcher], words: Sequence[str]) -> None:
    """While the store is away, a line says so each time."""
    watch = watcher(*words, store=f"redis://127.0.0.1:{free_port()}/0")
    assert "Traceback" not in watch.read_until("the store of locks: the store could not be reached", 2)
    assert 0 == watch.interrupt()


@one_pool
def test_watch_json(env: WorkerEnvironment, watcher: Callable[..., Watcher]) -> None:
    """Each look is one line of JSON."""
    key = leave_lock(env, node := f"gone@{env.tag}")
    watch = watcher("--json", "--node", node)
    first, second, *_ = watch.read_until("\n", 2).splitlines()
    assert key in [one["key"] for one in json.loads(first)]
    assert json.loads(second)
    assert 0 == watch.interrupt()


# -- check -------------------------------------------------------------------------------------


@one_pool
def test_check(env: WorkerEnvironment, celery: Run, quick: Quick) -> None:
    """The exit status and one line tell whether a bound is passed."""
    env.get(env.job("skip_value").delay(env.tag))
    env.hold("skip_value", acts="hold")
    words = ["check", "--task", "job.skip_value"]
    done = celery("singleton", *words, "--max-age", "1h", "--max-blocked", "9", "--no-success-for", "1h")
    assert (0, "") == (done.returncode, done.stderr)
    assert re.fullmatch(
        r"SINGLETON OK - \d locks of 1 tasks \| locks=\d;;;0 oldest=\d+s;3600;7200;0 blocked=0;9;18;0 lost=\d+c;;;0 "
        r"since_success=\d+s;3600;7200;0\n",
        done.stdout,
    )
    assert "already" == env.get(env.job("skip_value").delay(env.tag))
    late = quick(*words, "--max-blocked", "0")
    assert late.output.startswith("SINGLETON CRITICAL - job.skip_value: a holder has met 1 duplicates | ")
    assert 2 == late.exit_code
    as_json = json.loads(quick(*words, "--max-age", "0", "--json").output)
    assert ("CRITICAL", 1) == (as_json["status"], as_json["values"]["blocked"])
    health = locks.check(env.app, ["job.skip_value"], max_age=3600, max_blocked=0)
    assert (2, late.output.partition(" - ")[2].partition(" | ")[0]) == (health.status, health.text)


@one_pool
def test_check_without_answer(celery: Run, quick: Quick, empty_store: RedisServer) -> None:
    """If the store is away, missing, or knows no task, and after a wrong option, the status is UNKNOWN, in one line."""
    away = f"redis://127.0.0.1:{free_port()}/0"
    done = celery("-b", "memory://", "singleton", "check", store=None)
    assert (3, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("SINGLETON UNKNOWN - no store for locks"), done.stdout
    for found, said in [
        (quick("check", store=away), "the store of locks: the store could not be reached"),
        (quick("check", store="memory://"), "memory:// keeps no records"),
        (quick("check", store=empty_store.url()), "no worker has registered a task"),
        (quick("check", "--task", "job.skp"), "no worker has registered job.skp"),
        (quick("check", "--max-age", "soon"), "Invalid value for '--max-age'"),
    ]:
        assert 3 == found.exit_code
        assert found.output.startswith(f"SINGLETON UNKNOWN - {said}"), found.output
        assert 1 == len(found.output.splitlines())
    wrong = json.loads(quick("check", "--json", "--max-age", "soon").output)
    assert ("UNKNOWN", True) == (wrong["status"], wrong["text"].startswith("Invalid value for '--max-age'"))
    never = quick("check", "--task", "job.skp", "--no-success-for", "0")
    said = "SINGLETON CRITICAL - job.skp: no success since the store started"
    assert (2, True) == (never.exit_code, never.output.startswith(said)), never.output


# -- inspect -----------------------------------------------------------------------------------


@knows_commands_of_others
def test_inspect(env: WorkerEnvironment, pool: str, celery: Run) -> None:
    """Each worker names the tasks that it runs under locks, with their keys and processes."""
    result = env.hold()
    words = ["--timeout", f"{SOON:g}", "--destination", env.worker.hostname()]
    done = celery("inspect", "singleton_locks", "--json", *words)
    (found,) = [one for one in json.loads(done.stdout)[env.worker.hostname()]["tasks"] if one["task_id"] == result.id]
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


def test_body_whose_lease_has_ended(env: WorkerEnvironment, pool: str) -> None:
    """A worker names a body that goes on after `lock_at_most`, though it renews its lease no more. So nobody frees its lock."""
    env.hold("capped")
    (lock,) = locks.show(env.app, env.key("capped"))
    until(lambda: env.lock_signals(env.key("capped"), "lock_lost"), "the lease is lost")
    held = None if pool == "prefork" else False
    until(
        lambda: [(lock.holder.pid, held)] == [(one["pid"], one["held"]) for one in asked(env, "capped")], "it is named"
    )
    assert [releasing.RUNNING] == releasing.answers_of(env.app, [lock.holder._replace(age=60.0)], SOON)
    env.let_go()
    until(lambda: not asked(env, "capped"), "it has ended")


def test_inspect_slots(env: WorkerEnvironment, pool: str) -> None:
    """With a limit a worker names the slot of each task: at once where it runs the body itself, in prefork after a renewal."""
    options = {"lock_options": {"lock_ttl": 9}}
    results = [env.job("limit_wait").apply_async((env.tag, "hold"), **options) for _ in range(2)]
    env.wait_for("start", count=2)
    held = {one.holder.task_id: one.key for one in locks.show(env.app, env.key("limit_wait"))}
    assert 2 == len(set(held.values()))
    until(lambda: held == {one["task_id"]: one["key"] for one in asked(env, "limit_wait")}, "each slot is named")
    env.let_go()
    for result in results:
        env.get(result)


def asked(env: WorkerEnvironment, name: str = "skip") -> list[dict[str, Any]]:
    """Return what the worker says of the tasks of this test that have the lock of a job.

    It may also run what an earlier test has left, such as the delayed copy of a message that waited in line.
    """
    node = env.worker.hostname()
    (reply,) = env.app.control.broadcast("singleton_locks", destination=[node], reply=True, timeout=SOON)
    return [one for one in reply[node]["tasks"] if one["key"].startswith(env.key(name))]


# -- errors ------------------------------------------------------------------------------------


#: Each command, with what it needs.
COMMANDS: dict[str, list[str]] = {
    "list": [],
    "stats": [],
    "check": [],
    "show": ["KEY"],
    "release": ["KEY"],
    "pause": ["KEY", "--for", "1s"],
    "resume": ["KEY"],
    "history": ["KEY"],
}


def test_all_commands_are_tested() -> None:
    """No command is missing in the tests of errors and of the environment."""
    assert {*COMMANDS, "watch", "exporter"} == set(singleton.commands)  # the last one has tests of its own


@one_pool
@pytest.mark.parametrize("verb", ["show", "release"])
def test_errors_are_one_line(env: WorkerEnvironment, celery: Run, verb: str) -> None:
    """A wrong key, a store that is away and an app without a store are told in one line each."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    for done, said in [
        (celery("singleton", verb, "celery:lock:1"), "Error: 'celery:lock:1' is no key of a lock of this app"),
        (celery("singleton", verb, env.key(), store=nowhere), "Error: the store of locks: "),
        (celery("-b", "memory://", "singleton", verb, env.key(), store=None), "Error: no store for locks: "),
    ]:
        assert done.returncode == 3
        assert done.stderr.startswith(said), done.stderr
        assert 1 == len(done.stderr.splitlines()), done.stderr


@one_pool
@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if verb != "check"])
def test_store_that_cannot_be_asked(env: WorkerEnvironment, quick: Quick, verb: str) -> None:
    """Each command tells in one line that the store is away, or keeps no records."""
    words = [env.key() if word == "KEY" else word for word in COMMANDS[verb]]
    for done, said in [
        (quick(verb, *words, store=f"redis://127.0.0.1:{free_port()}/0"), "Error: the store of locks: "),
        (quick(verb, *words, store="memory://"), "Error: memory:// keeps no records of locks"),
    ]:
        assert 3 == done.exit_code
        assert done.output.startswith(said), done.output
        assert 1 == len(done.output.splitlines()), done.output


@one_pool
@pytest.mark.parametrize("verb", ["list", "check"])
def test_no_app(env: WorkerEnvironment, tmp_path: Path, verb: str) -> None:
    """Without -A, the error of the missing store says that the app is missing."""
    line, variables = line_of(tmp_path, "singleton", verb, **servers_of(env))
    line = [word for word in line if word not in ("-A", "bare")]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LATE)
    said = done.stdout + done.stderr
    assert (3, 1) == (done.returncode, len(said.splitlines()))
    assert said.startswith(("Error: no store for locks: ", "SINGLETON UNKNOWN - no store for locks: "))
    assert "; no app was given: celery -A APP singleton" in said


@one_pool
@pytest.mark.parametrize("verb", ["list", "stats", "history", "check", "watch"])
def test_records_that_are_switched_off(env: WorkerEnvironment, verb: str) -> None:
    """With `singleton_lock_stats` off, commands that read records say so."""
    done = without_records(env)(verb, *(["job.skip"] if verb == "history" else []))
    assert "no records of locks are kept, as singleton_lock_stats is off" in done.output
    assert 3 == done.exit_code


def without_records(env: WorkerEnvironment) -> Quick:
    """Return `quick` for an app that keeps no records."""
    app = Celery("quick", broker="memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=servers_of(env)["store"], singleton_lock_stats=False)
    return lambda *words: CliRunner().invoke(singleton, words, obj=SimpleNamespace(app=app))


@one_pool
def test_lock_without_a_record(env: WorkerEnvironment) -> None:
    """A key tells all holders of its lock, also where no records are kept: `show`, `release` and `pause`."""
    key, quick = leave_lock(env, "gone@local", "second", "limit_skip", limit=2, history=None), without_records(env)
    leave_lock(env, "gone@local", "first", "limit_skip", limit=2, history=None)
    locks.release(env.app, key, force=True)
    shown = quick("show", key).output
    assert shown.startswith(f"{key}:1 is held by task first on gone@local "), shown
    released = quick("release", key).output.splitlines()
    assert "free: nobody held it" == released[0]
    assert released[1].startswith("but held by task first on gone@local ")
    assert released[1].endswith(f" {key}:1")
    assert quick("pause", key, "--for", "1m").output.endswith("; bodies that still run: 1\n")
    assert 0 == quick("resume", key).exit_code
    assert 0 == quick("release", f"{key}:1", "--force").exit_code
    held = quick("pause", "--task", "job.skip", "--for", "1m")
    try:
        assert (0, True) == (held.exit_code, held.output.endswith("; bodies that still run: not known\n")), held.output
    finally:
        assert 0 == quick("resume", "--task", "job.skip").exit_code


@one_pool
def test_wrong_keys(env: WorkerEnvironment, quick: Quick) -> None:
    """A key of which a part is missing, or that has too much, is refused, and nothing is held."""
    key, base = env.key(), env.key().rpartition(":")[0]
    for wrong in (f"{base}:", f"{base}:zz", key[:-1], f"{key}:", f"{key}:0", f"{key}:x", f"{key} ", f"{base}:*:1"):
        for words in (["show"], ["release"], ["pause", "--for", "1s"], ["resume"], ["history"]):
            done = quick(*words, wrong)
            assert (3, True) == (done.exit_code, " is no key of a lock of this app: such a key " in done.output), wrong
    assert [] == [lock for lock in locks.find(env.app) if lock.holder.state == "paused"]
    empty = quick("show", "")
    assert (3, True) == (empty.exit_code, empty.output.startswith("Error: no name, id or key is given"))


@one_pool
@pytest.mark.parametrize("verb", sorted({*COMMANDS, "watch"} - {"show"}))
def test_member_of_a_group(env: WorkerEnvironment, quick: Quick, verb: str) -> None:
    """The name of a task in a lock group has no locks of its own: each command says which name has them."""
    until(lambda: "customers" in locks.tasks(env.app), "the worker has registered its tasks")
    words = ["group.bill"] if verb == "history" else ["--task", "group.bill"]
    more = {"pause": ["--for", "1s"], "check": ["--no-success-for", "1s"]}
    done = quick(verb, *words, *more.get(verb, []))
    assert (3, True) == (
        done.exit_code,
        "task 'group.bill' has its locks in a lock group: name 'customers'" in done.output,
    )
    assert 1 == len(done.output.splitlines())
    if "KEY" in COMMANDS.get(verb, ()):
        key = env.key().replace("{job.skip}", "{group.bill}")
        by_key = quick(verb, *[key if word == "KEY" else word for word in COMMANDS[verb]])
        assert (3, True) == (by_key.exit_code, "name 'customers' instead" in by_key.output)


@one_pool
def test_unregistered_task(env: WorkerEnvironment, empty_store: RedisServer, quick: Quick) -> None:
    """Locks of a task that no worker has registered are found by its name; a pause of one is listed, but not one of the name."""
    store = empty_store.url()
    spec = LeaseSpec("singleton:{job.skip}", "d" * 32, queued_token("t1"), 60.0, "t1", queued=True)
    RedisStore(connector(store, {}), history=100).acquire(spec)
    unknown = "Warning: no worker has registered a task in this store yet; each does so every minute"
    assert [unknown, "no locks"] == sorted(quick("list", store=store).output.splitlines())
    nobody = f"no lock is held by a task {spec.task_id}; one that waits has none yet"
    assert [unknown, nobody] == sorted(quick("show", spec.task_id, store=store).output.splitlines())
    assert spec.lock in quick("list", "--task", "job.skip", store=store).output
    for words in (["pause", "--for", "1m"], ["resume"]):
        refused = quick(*words, "--task", "job.skip", store=store)
        assert 3 == refused.exit_code
        assert "no worker has registered a task or lock group 'job.skip'" in refused.output
    quick("pause", env.key(), "--for", "1m", store=store)
    listed = json.loads(quick("list", "--json", store=store).output)
    assert {(env.key(), "paused"), (spec.lock, "queued")} == {(one["key"], one["holder"]["state"]) for one in listed}


@one_pool
def test_no_history(env: WorkerEnvironment) -> None:
    """Without a history, the command says why there are no runs."""
    app = Celery("quick", broker="memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=servers_of(env)["store"], singleton_lock_history=0)
    done = CliRunner().invoke(singleton, ["history", "job.skip"], obj=SimpleNamespace(app=app))
    assert "no runs are kept, as singleton_lock_history is 0\n" == done.output


@one_pool
def test_wrong_words(env: WorkerEnvironment, quick: Quick) -> None:
    """Neither or both of a key and a name, and a wrong duration, are refused before anything is done."""
    for words in (
        ["release"],
        ["release", env.key(), "--task", "job.skip"],
        ["pause", "--for", "1h"],
        ["pause", env.key(), "--task", "job.skip", "--for", "1h"],
        ["pause", env.key()],
        ["pause", env.key(), "--for", "0"],
        ["resume"],
        ["list", "--min-age", "long"],
        ["watch", "--every", "0"],
    ):
        assert 2 == quick(*words).exit_code, words
    assert [] == locks.show(env.app, env.key())


@one_pool
def test_environment_is_no_option(env: WorkerEnvironment, celery: Run) -> None:
    """Variables that Kubernetes sets for a service of that name are no options; the app's own options do no harm."""
    names = ("FORCE", *(f"RELEASE_{name}" for name in ("FORCE", "DRY_RUN", "AS_JSON", "JSON", "KEY", "NODE", "TASK")))
    variables = {f"CELERY_SINGLETON_{name}": "tcp://10.0.0.1:9808" for name in names}
    result = env.hold()
    done = answered(env, partial(celery, **variables), "singleton", "--colour", "never", "release", env.key())
    assert (1, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith(f"refused: {env.worker.hostname()} runs this task; held by task {result.id} ")


@one_pool
@pytest.mark.parametrize("verb", COMMANDS)
def test_no_option_is_in_the_environment(env: WorkerEnvironment, quick: Quick, verb: str) -> None:
    """No option and no argument of any command is read from the environment."""
    names = [word.lstrip("-") for one in singleton.commands[verb].params for word in (*one.opts, one.name or "")]
    variables = {f"CELERY_SINGLETON_{verb}_{name}".upper().replace("-", "_"): "tcp://10.0.0.1:9808" for name in names}
    leave_lock(env, "gone@local")
    words = [env.key() if word == "KEY" else word for word in COMMANDS[verb]]
    done = quick(verb, *words, **variables)
    locks.resume(env.app, env.key())
    assert (1 if verb in ("release", "resume") else 0) == done.exit_code, done.output
    if "KEY" in COMMANDS[verb]:
        assert 2 == quick(verb, *words[1:], **variables).exit_code
