"""The environment of a test: it sends jobs, reads what they did, and lets waiting bodies end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import redis
from celery import Task, states
from celery.exceptions import ChordError
from celery.result import AsyncResult
from celery.signals import before_task_publish
from pytest_celery import CeleryTestSetup

from tests.integration.nodes import LocalWorkerNode
from tests.integration.recorder import Event, Recorder
from tests.integration.tasks import lock_tag, no_publish
from tests.servers import until

#: Seconds for which a test waits for what is due soon: only a hang takes longer.
SOON = 60.0


class WorkerEnvironment:
    """The set-up of one test; ``tag`` makes its lock keys."""

    def __init__(self, setup: CeleryTestSetup, recorder: Recorder, tag: str) -> None:
        self.setup = setup
        self.app = setup.app
        self.recorder = recorder
        self.tag = tag
        self._tags = {tag}

    @property
    def worker(self) -> LocalWorkerNode:
        """The first worker."""
        return self.setup.worker  # type: ignore[return-value]

    def worker_of(self, pool: str) -> LocalWorkerNode:
        """Return the first worker with this pool."""
        return next(node for node in self.setup.worker_cluster if node.container.spec.pool == pool)

    def job(self, name: str) -> Task:
        """Return the task ``job.<name>``, or the one of a name with a dot."""
        return self.app.tasks[name if "." in name else f"job.{name}"]

    def other_tag(self, suffix: str) -> str:
        """Return another tag of this test."""
        tag = f"{self.tag}-{suffix}"
        self._tags.add(tag)
        return tag

    # -- holding ---------------------------------------------------------------------------------

    def hold(
        self, name: str = "skip", tag: str | None = None, acts: Any = ("hold", "return"), **options: Any
    ) -> AsyncResult:
        """Start a job whose body waits for ``let_go``, and return once it waits."""
        tag = tag or self.tag
        before = len(self.starts(tag))
        result = self.job(name).apply_async((tag,), {"acts": acts}, **options)
        until(lambda: len(self.starts(tag)) > before, f"{name} starts")
        return result

    def let_go(self, tag: str | None = None) -> None:
        """Let the waiting bodies of a tag end."""
        self.recorder.raise_flag(f"{tag or self.tag}.go")

    def let_all_go(self) -> None:
        """Let all waiting bodies of the test end."""
        for tag in self._tags:
            self.let_go(tag)

    # -- events ----------------------------------------------------------------------------------

    def events(self, what: str | None = None, tag: str | None = None) -> list[Event]:
        """Return what was recorded under a tag."""
        return self.recorder.events(tag or self.tag, what)

    def starts(self, tag: str | None = None) -> list[Event]:
        """Return the starts of bodies of a tag."""
        return self.events("start", tag)

    def wait_for(self, what: str, tag: str | None = None, count: int = 1, timeout: float = SOON) -> Event:
        """Wait for the ``count``-th event of a kind, and return it."""
        found = until(lambda: self.events(what, tag)[count - 1 :], f"{what} number {count}", timeout)
        return found[0]

    def signals(self, task_id: str, what: str | None = None) -> list[Event]:
        """Return the recorded Celery signals of a task."""
        return self.recorder.events(f"signals-{task_id}", what)

    def lock_signals(self, key: str, what: str | None = None) -> list[Event]:
        """Return the recorded library signals of a lock key."""
        return self.recorder.events(lock_tag(key), what)

    # -- the store -------------------------------------------------------------------------------

    def key(self, name: str = "skip", tag: str | None = None) -> str:
        """Return the lock key of a job."""
        return str(self.job(name).lock_key_for(tag or self.tag))  # type: ignore[attr-defined]

    def store(self) -> redis.Redis:
        """Return a client of the store."""
        conf = self.app.conf
        urls = (conf.get("singleton_lock_url"), conf.broker_url, conf.result_backend)
        return redis.Redis.from_url(next(url for url in urls if url and url.startswith("redis:")))

    def is_locked(self, name: str = "skip", tag: str | None = None) -> bool:
        """Tell whether the lock key of a job exists."""
        with contextlib.closing(self.store()) as client:
            return bool(client.exists(self.key(name, tag)))

    def tickets(self, name: str, tag: str | None = None) -> list[bytes]:
        """Return the tickets of the messages that wait for the lock of a job, in order."""
        with contextlib.closing(self.store()) as client:
            return client.zrange(self.key(name, tag).replace(":lock:", ":line:"), 0, -1)  # type: ignore[return-value]

    # -- results ---------------------------------------------------------------------------------

    def get(self, result: AsyncResult, timeout: float = SOON) -> Any:
        """Return a result, or raise what the task raised."""
        return result.get(timeout=timeout)

    def error(self, result: AsyncResult, timeout: float = SOON) -> BaseException:
        """Return the exception that waiting for a result raises."""
        try:
            value = result.get(timeout=timeout)
        except Exception as error:
            return error
        raise AssertionError(f"no error, but {value!r}")

    def revoke(self, result: AsyncResult, **options: Any) -> None:
        """Revoke a task in this module's workers alone: each other one would store REVOKED for it, too, in its own serializer."""
        nodes = [node.hostname() for node in self.setup.worker_cluster]
        self.app.control.revoke(result.id, destination=nodes, **options)

    def wait_for_state(self, result: AsyncResult, *states: str, timeout: float = SOON) -> str:
        """Wait until a task has one of these states."""
        return until(lambda: (state := result.state) in states and state, f"state in {states}", timeout)

    def finish(self, task_id: str, timeout: float = SOON) -> None:
        """Wait until the worker has no delivery of a task left, waiting ones included."""
        until(lambda: self._is_idle(task_id) and self._is_idle(task_id), "finished", timeout, 0.1)

    def finish_node(self, queue: str) -> None:
        """Wait until no body is left in the worker of a queue."""
        nodes = self.setup.worker_cluster
        name = next(node.hostname() for node in nodes if node.worker_queue == queue)
        inspect = self.app.control.inspect([name], timeout=10.0)
        until(lambda: (inspect.active() or {name: True})[name] == [], f"{name} is idle")

    def _is_idle(self, task_id: str) -> bool:
        node = self.worker.hostname()
        found = self.app.control.inspect([node], timeout=10.0).query_task(task_id) or {}
        return node in found and not found[node] and not self._waiting_messages()

    def _waiting_messages(self) -> int:
        queue = self.worker.worker_queue
        with self.app.connection_for_read() as connection:
            try:
                return int(connection.default_channel.queue_declare(queue, passive=True)[1])
            except connection.channel_errors:
                return 0  # an empty queue is none at all in Redis

    def chord_failed(self, result: AsyncResult) -> bool:
        """Tell whether a chord's body failed over a member; ``get`` raises that member's error."""
        self.wait_for_state(result, states.FAILURE)
        return isinstance(result.result, ChordError)

    def allow_publishing(self, allowed: bool) -> None:
        """Let publishing by the workers work or fail; this process can always publish."""
        for node in self.setup.worker_cluster:
            flag = no_publish(node.worker_queue)
            self.recorder.lower_flag(flag) if allowed else self.recorder.raise_flag(flag)

    # -- messages --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def captured_messages(self) -> Iterator[list[dict[str, Any]]]:
        """Record the messages that this thread publishes, so that ``redeliver`` can send them again.

        Another thread of this process publishes for the bodies of 90 s (``ninety_seconds``).
        """
        messages: list[dict[str, Any]] = []
        publisher = threading.get_ident()

        def keep(body: Any = None, routing_key: str = "", **kwargs: Any) -> None:
            if threading.get_ident() == publisher:
                messages.append({"body": body, "routing_key": routing_key, **kwargs})

        before_task_publish.connect(keep, weak=False)
        try:
            yield messages
        finally:
            before_task_publish.disconnect(keep)

    def key_of(self, message: dict[str, Any]) -> str:
        """Return the lock key of a recorded message."""
        args, kwargs, _ = message["body"]
        return str(self.app.tasks[message["headers"]["task"]].lock_key_for(*args, **kwargs))

    def kill_body(self, start: Event) -> None:
        """Kill the pool process in which a body started with SIGKILL."""
        assert start["pid"] != self.worker.container.process.pid, "this is the whole worker"
        os.kill(start["pid"], signal.SIGKILL)

    def redeliver(self, message: dict[str, Any]) -> None:
        """Publish a recorded message once more, with the same task id."""
        properties = {k: v for k, v in message["properties"].items() if k != "serializer"}
        with self.app.producer_or_acquire() as producer:
            producer.publish(
                message["body"],
                routing_key=message["routing_key"],
                exchange="",
                headers=message["headers"],
                serializer="json",
                **properties,
            )
