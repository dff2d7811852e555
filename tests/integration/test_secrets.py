"""The library shows a secret argument nowhere if it was published with a redacted ``argsrepr``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import states
from celery.result import AsyncResult

from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.event_stream import EventStream
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Event
from tests.integration.tasks import Odd
from tests.servers import RedisServer, until


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {
        "singleton_lock_url": own_store.url(),
        "accept_content": ["json", "pickle"],
        "task_send_sent_event": True,
    }


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker_specs(pool: str) -> Sequence[WorkerSpec]:
    return [WorkerSpec(pool, options=("-E",))]


class Leaks:
    """The places where a secret could appear; only what was written since is searched."""

    def __init__(self, env: WorkerEnvironment, store: RedisServer, directory: Path) -> None:
        self.secret = f"s3cret{secrets.token_hex(8)}"
        self._bench, self._store, self._directory = env, store, directory
        self._stream = EventStream(env)

    def __enter__(self) -> Leaks:
        self._stream.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.__exit__(*exc_info)

    @property
    def events(self) -> list[Event]:
        return self._stream.events

    def send(self, name: str, secret: object = None, **options: Any) -> AsyncResult:
        """Publish a task with the secret, redacted as far as Celery permits."""
        redacted = {"argsrepr": "<redacted>", "kwargsrepr": "<redacted>"}
        args = (self._bench.tag, self.secret if secret is None else secret)
        task = self._bench.app.tasks[f"secret.{name}"]
        return task.apply_async(args, **redacted, **options)

    def found(self, *results: AsyncResult, store: bool = True) -> list[str]:
        """Return the names of the places that show the secret."""
        places = {
            "log": self._bench.worker.logs(),
            "events": repr(self.events),
            "locks": "".join(self._dump(self._store.url(), "*")) if store else "",
            "results": "".join(self._dump(self._bench.app.conf.result_backend, "celery-task-*")),
            "errors": "".join(repr(result.result) + str(result.traceback) for result in results),
            "signals": "".join(p.read_text() for p in self._directory.glob("lock-*.jsonl")),
        }
        return [place for place, text in places.items() if self.secret in text]

    def _dump(self, url: str, pattern: str) -> Iterator[str]:
        client = redis.Redis.from_url(url, decode_responses=True, encoding_errors="replace")
        for key in client.scan_iter(pattern):
            yield f"{key}={self._value(client, key)}\n"
        client.close()

    def _value(self, client: redis.Redis, key: str) -> object:
        read = {"hash": client.hgetall, "string": client.get, "set": client.smembers}
        kind = client.type(key)
        if kind in read:
            return read[kind](key)
        return client.zrange(key, 0, -1) if kind == "zset" else client.lrange(key, 0, -1)


@pytest.fixture
def leaks(env: WorkerEnvironment, own_store: RedisServer, run_directory: Path) -> Iterator[Leaks]:
    with Leaks(env, own_store, run_directory) as leaks:
        yield leaks


@pytest.mark.parametrize("policy", ["skip", "retry", "raise"])
def test_duplicate(env: WorkerEnvironment, leaks: Leaks, policy: str) -> None:
    """Logs, events, keys, errors and results of a duplicate do not show the secret, under any policy."""
    holder = leaks.send(policy)
    env.wait_for("start")
    duplicate = leaks.send(policy)
    if policy == "retry":
        env.wait_for_state(duplicate, states.RETRY)
        # Search again after its second delivery, which the worker published and not the caller.
        key = env.app.tasks["secret.retry"].lock_key_for(env.tag, leaks.secret)
        until(lambda: len(env.lock_signals(key, "duplicate")) >= 2, "a second look")
    else:
        duplicate.get(timeout=SOON, propagate=False)
    assert [] == leaks.found(holder, duplicate)
    env.let_go()
    holder.get(timeout=SOON)
    duplicate.get(timeout=SOON, propagate=False)
    until(lambda: [e for e in leaks.events if e.get("uuid") == duplicate.id], "its events")
    time.sleep(0.3)
    assert [] == leaks.found(holder, duplicate)


def test_lock_key_template(env: WorkerEnvironment, leaks: Leaks) -> None:
    """The key has only a digest of a template field, so it does not show the value."""
    holder = leaks.send("template")
    env.wait_for("start")
    leaks.send("template").get(timeout=SOON)
    assert [] == leaks.found(holder)


def test_refused_type(env: WorkerEnvironment, leaks: Leaks) -> None:
    """The error about an argument without a stable form names the parameter and the type, not the value."""
    result = leaks.send("skip", Odd(leaks.secret), serializer="pickle")
    error = env.error(result)
    assert "LockKeyError" == type(error).__name__
    assert "secret" in str(error)
    assert "Odd" in str(error)
    assert [] == leaks.found(result)


def test_refused_nesting(env: WorkerEnvironment, leaks: Leaks) -> None:
    """The error about an argument that is nested too deep does not show the value."""
    nested: list[Any] = [leaks.secret]
    for _ in range(70):
        nested = [nested]
    result = leaks.send("skip", nested)
    assert "LockKeyError" == type(env.error(result)).__name__
    assert [] == leaks.found(result)


def test_store_away(env: WorkerEnvironment, leaks: Leaks, own_store: RedisServer) -> None:
    """The messages about an unreachable store do not show the secret."""
    own_store.stop()
    try:
        result = leaks.send("skip")
        env.wait_for_state(result, states.RETRY, states.FAILURE)
        found = leaks.found(result, store=False)
    finally:
        own_store.start()
    assert found == []
    env.let_go()
    result.get(timeout=SOON)


def test_copied_request(env: WorkerEnvironment) -> None:
    """A body's copy or pickle of its request does not contain the token of its lease."""
    assert "copied" == env.get(env.job("skip").delay(env.tag, "copy_request"))
