"""An environment of the fault matrix: its own broker, store and workers, their faults, and the checker's result."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import psutil
import redis
from celery import Celery
from celery.result import AsyncResult
from kombu import pools

from tests.faults.checker import Violation, bodies_of, check, table, unfinished
from tests.faults.ledger import Event, Ledger, now
from tests.faults.probes import Commands, Deaths, Keys, Watching, scripts
from tests.faults.proxy import Proxy
from tests.faults.schedule import Fault, Limits, Schedule
from tests.faults.tasks import make_app
from tests.servers import Process, RabbitMQServer, RedisServer, new_directory, remove_directory, until, warden
from tests.stacks import stacks_of
from tests.timeouts import is_timeout

#: Seconds within which the lease of a killed child is released, whatever its TTL.
CHILD_BOUND = 6.0

#: Rows of the report: name, bound, measured value.
FIGURES: list[tuple[str, str, str]] = []


class WorkerFailed(Exception):
    """A worker was started and did not become ready."""


class Worker:
    """A real ``celery worker`` process with its children."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        pool: str,
        concurrency: int,
        options: Sequence[str],
        conf: dict[str, Any],
        **env: str,
    ):
        self.name = f"{pool}-{secrets.token_hex(3)}"
        self.node = f"{self.name}@local"
        self.pool = pool
        self.pids: frozenset[int] = frozenset()
        command = [sys.executable, "-m", "celery", "-A", "tests.faults.worker_app", "worker", "--pool", pool]
        command += ["--concurrency", str(concurrency), "--hostname", self.node, "--loglevel", "INFO"]
        command += ["--without-mingle", "--without-gossip", *options]
        own = {
            "FAULTS_CONF": json.dumps({**environment.conf, **conf}),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "C_FORCE_ROOT": "1",
            **env,
        }
        self.process = Process(command, environment.ledger.directory / f"{self.name}.log", {**os.environ, **own})
        self.process.start()

    def ready(self, app: Celery) -> Worker:
        """Wait for the answer to a ping.

        Raises:
            WorkerFailed: the worker has ended, or no answer came within a minute.
        """

        def answers() -> bool:
            if not self.process.running:
                raise WorkerFailed(f"{self.name} ended:\n{self.process.output()[-4000:]}")
            return bool(app.control.ping(destination=[self.node], timeout=0.5))

        try:
            until(answers, f"{self.name} is ready", timeout=90)
        except AssertionError as slow:
            raise WorkerFailed(f"{slow}\n{self.process.output()[-4000:]}") from None
        return self

    def all_pids(self) -> frozenset[int]:
        """Return the process ids of the main process and of all its children."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return frozenset({self.process.pid, *(child.pid for child in children)})

    def exit_code(self, timeout: float) -> int | None:
        """Return the exit code, or None if the worker still runs after ``timeout`` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


class WorkerEnvironment:
    """One run of a row of the matrix.

    Args:
        ttl: ``lock_ttl`` in seconds.
        broker: ``redis``, or a RabbitMQ server.
        proxied: workers reach the store through ``self.proxy``.
        broker_proxied: workers reach the broker through ``self.broker_proxy``.
        store: options of the store's server.
        store_env: additional environment variables of that server.
        conf: configuration of workers and of the test's app.
    """

    def __init__(
        self,
        ttl: float,
        broker: str | RabbitMQServer = "redis",
        proxied: bool = False,
        broker_proxied: bool = False,
        store: Sequence[str] = (),
        store_env: dict[str, str] | None = None,
        **conf: Any,
    ) -> None:
        self.limits = Limits(ttl, conf.get("singleton_lock_store_timeout", 1.0))
        self.schedule = Schedule()
        self.ledger = Ledger(new_directory("faults"))
        self.workers: list[Worker] = []
        self.queue = f"faults-{secrets.token_hex(4)}"
        self._stack = contextlib.ExitStack()
        self._stack.callback(remove_directory, self.ledger.directory)
        try:
            with _environment(store_env or {}):
                self.store = self._stack.enter_context(RedisServer(*store))
            self._build(broker, proxied, broker_proxied, conf)
        except BaseException:
            self._stack.close()
            raise

    def _build(self, broker: str | RabbitMQServer, proxied: bool, broker_proxied: bool, conf: Any) -> None:
        self.own_redis = self._stack.enter_context(RedisServer())
        broker_port = broker.port if isinstance(broker, RabbitMQServer) else self.own_redis.port
        broker_url = broker.url() if isinstance(broker, RabbitMQServer) else self.own_redis.url()
        seen_store, seen_broker = self.store.url(), broker_url
        if proxied:
            self.proxy = self._stack.enter_context(Proxy(self.store.port))
            seen_store = seen_store.replace(str(self.store.port), str(self.proxy.port))
        if broker_proxied:
            self.broker_proxy = self._stack.enter_context(Proxy(broker_port))
            seen_broker = seen_broker.replace(str(broker_port), str(self.broker_proxy.port))
        self.conf = {
            "broker_url": seen_broker,
            "result_backend": self.own_redis.url(1),
            "singleton_lock_url": seen_store,
            "singleton_lock_ttl": self.limits.ttl,
            "faults_directory": str(self.ledger.directory),
            "task_default_queue": self.queue,
            "task_track_started": True,
            "worker_prefetch_multiplier": 1,
            "broker_connection_retry_on_startup": True,
            **conf,
        }
        self.app = make_app({**self.conf, "broker_url": broker_url, "singleton_lock_url": self.store.url()})
        self.app.set_current()
        self._stack.callback(pools.reset)  # a later row may have a broker on the same port
        self._stack.callback(self.app.close)
        self.app.backend.result_consumer.cancel_for = lambda task_id: None
        self._watchers: list[Watching | Commands] = [
            Keys(self.ledger, self.store.url()),
            Deaths(self.ledger),
            Commands(self.ledger, self.store.url()),
        ]
        for watcher in self._watchers:
            watcher.start()
        self.watch_commands()

    def __enter__(self) -> WorkerEnvironment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is not None:
                print(self.story())
            if error is not None and is_timeout(error):
                print(*(stacks_of(worker.process) for worker in self.workers))
        finally:
            for worker in self.workers:
                worker.process.signal_all(signal.SIGCONT)
                worker.process.kill()
            for watcher in self._watchers:
                watcher.close()
            self._stack.close()

    # -- workers and messages ----------------------------------------------------------------------

    def start(self, pool: str = "prefork", concurrency: int = 2, options: Sequence[str] = (), **conf: Any) -> Worker:
        """Start a worker without waiting until it is ready."""
        env = conf.pop("env", {})
        worker = Worker(self, pool, 1 if pool == "solo" else concurrency, options, conf, **env)
        self.workers.append(worker)
        return worker

    def worker(self, pool: str = "prefork", concurrency: int = 2, options: Sequence[str] = (), **conf: Any) -> Worker:
        """Start a worker and wait until it is ready."""
        return self.start(pool, concurrency, options, **conf).ready(self.app)

    def send(self, name: str, tag: str, *acts: Sequence[Any], expect: str = "any", **options: Any) -> AsyncResult:
        """Send a task and record how often it is expected to run (see ``checker``), unless the publisher skips it."""
        at = now()
        result = self.app.tasks[name].apply_async((tag,), {"acts": acts or [["sleep"]]}, **options)
        met = getattr(result, "duplicate", None)
        if met is None or met.task_id != result.id:
            self.expect(result.id, expect, at, f"{name} {tag}")
        return result

    def expect(self, task_id: str, expect: str, at: float | None = None, work: str = "") -> None:
        """Record how often a task is expected to run."""
        self.ledger.note("sent", at, task_id=task_id, expect=expect, work=work)

    def in_line(self, name: str, tag: str) -> int:
        """Return how many messages wait in line for a lock."""
        with contextlib.closing(self.client()) as client:
            key = self.app.tasks[name].lock_key_for(tag)
            return int(client.zcard(str(key).replace(":lock:", ":line:")))  # type: ignore[arg-type]

    def line_up(self, name: str, tag: str, count: int, *acts: Sequence[Any], **options: Any) -> list[AsyncResult]:
        """Send messages for a lock that is held, each once the one before has joined the line."""
        results = []
        for number in range(count):
            results.append(self.send(name, tag, *acts, **options))
            joined = partial(self._joins, results[-1].id)
            until(joined, f"number {number} of {name} {tag} is in line")
        return results

    def _joins(self, task_id: str) -> list[Event]:
        return self.ledger.events("line", does="join", task_id=task_id)

    def body(self, tag: str, count: int = 1, timeout: float = 60.0) -> Event:
        """Wait for the ``count``-th start of a body, and return it."""
        return until(lambda: self.ledger.events("start", tag=tag)[count - 1 :], f"{tag} starts", timeout)[0]

    def end(self, body: Event, timeout: float = 60.0) -> Event:
        """Wait until a body has ended, and return its end or the death of its process."""

        def over() -> list[Event]:
            ends = self.ledger.events("end", run=body["run"], pid=body["pid"])
            return ends or self.ledger.events("death", of=body["pid"])

        return until(over, f"{body['run']} ends", timeout)[0]

    def wait(self, what: str, timeout: float = 60.0, **same: Any) -> Event:
        """Wait for an event, and return the first one."""
        return until(lambda: self.ledger.events(what, **same), f"{what} {same}", timeout)[0]

    def go(self, tag: str) -> None:
        """Let the waiting bodies of a tag end."""
        self.ledger.raise_flag(f"{tag}.go")

    # -- leases ------------------------------------------------------------------------------------

    def gone(self, body: Event, timeout: float = 40.0) -> float:
        """Wait until a body's lease has left the store, and return when it did.

        The time is that of its release, or of the probe, which may come later or miss the lease.
        """

        def gone() -> list[float]:
            freed = [event for event in self.ledger.events("store", verb="release", run=body["run"]) if event["does"]]
            return [event["at"] for event in (*freed[:1], *self.ledger.events("gone", run=body["run"])[:1])]

        return float(min(until(gone, f"the lease of {body['run']} is gone", timeout)))

    def held(self, body: Event) -> bool:
        """Tell whether a body's lease is in the store."""
        seen = [e["what"] for e in self.ledger.events(run=body["run"]) if e["what"] in ("key", "gone")]
        return seen[-1:] == ["key"]

    def stay_held(self, seconds: float, *bodies: Event) -> None:
        """Check for ``seconds`` that these bodies keep their leases and none of their duplicates starts."""
        for body in bodies:
            until(lambda body=body: self.held(body), "its lease is seen", 2)  # type: ignore[misc]
        end, keys = now() + seconds, {body["key"] for body in bodies}

        def begun() -> int:
            return sum(event["key"] in keys for event in self.ledger.events("start"))

        before = begun()
        while now() < end:
            for body in bodies:
                assert self.held(body), f"{body['run']} has no lease"
            assert before == begun(), "a duplicate has started"
            time.sleep(0.1)

    def watch_commands(self) -> None:
        """Wait until the probe sees all commands of a server that was started again."""
        until(self._watchers[2].ready.is_set, "MONITOR")  # type: ignore[union-attr]

    def client(self) -> redis.Redis:
        """Return a client of the store that does not use the proxy."""
        return redis.Redis.from_url(self.store.url(), decode_responses=True, socket_timeout=2)

    def know_scripts(self) -> None:
        """Load the scripts into the store, so that no call is repeated because of an unknown script."""
        with contextlib.closing(self.client()) as client:
            for one in scripts().values():
                client.script_load(one.text)

    # -- faults ------------------------------------------------------------------------------------

    def kill_connections(self) -> None:
        """Kill all connections to the store but that of the probe."""
        with self.client() as client:
            for one in client.client_list():
                if "O" not in one["flags"]:
                    client.execute_command("CLIENT", "KILL", "ID", one["id"], "SKIPME", "yes")

    def kill(self, worker: Worker) -> Fault:
        """Kill a main process and its children with SIGKILL."""
        fault = self.schedule.add("kill", worker.all_pids(), bound=self.limits.ttl + 0.5)
        worker.process.kill()
        return fault

    def kill_child(self, pid: int, number: int = signal.SIGKILL) -> Fault:
        """Kill one child of a worker."""
        fault = self.schedule.add("kill", frozenset({pid}), bound=CHILD_BOUND)
        os.kill(pid, number)
        return fault

    @contextlib.contextmanager
    def stopped(self, worker: Worker) -> Iterator[Fault]:
        """Stop a main process and its children within the block, and let them continue after it."""
        with self.schedule.during("stop", worker.all_pids()) as fault:
            worker.process.signal_all(signal.SIGSTOP)
            yield fault
            worker.process.signal_all(signal.SIGCONT)

    @contextlib.contextmanager
    def child_stopped(self, pid: int) -> Iterator[Fault]:
        """Stop one child of a worker within the block, and let it continue after it."""
        with self.schedule.during("child stop", frozenset({pid})) as fault:
            os.kill(pid, signal.SIGSTOP)
            yield fault
            with contextlib.suppress(ProcessLookupError):  # it may have been killed
                os.kill(pid, signal.SIGCONT)

    def last(self, seconds: float, since: float | None = None) -> None:
        """Let a fault last for some time: its length is part of the case, so this is not a wait for a condition.

        Args:
            seconds: the whole length.
            since: when the fault began; now unless given.
        """
        time.sleep(max(0.0, seconds if since is None else since + seconds - now()))

    # -- the result --------------------------------------------------------------------------------

    def measured(self, what: str, bound: float, value: float, at_least: float = -0.1) -> None:
        """Record and print a figure, and check that it is within its bound."""
        limit = f"{at_least:.2g} to {bound:.3g} s" if at_least > 0 else f"{bound:.3g} s"
        FIGURES.append((what, limit, f"{value:.2f} s"))
        print(f"{what}: {value:.2f} s (bound {limit})")
        assert at_least <= value <= bound, f"{what}: {value:.2f} s is not within {limit}"

    def verdict(self) -> list[Violation]:
        """Stop the watchers, and return the checker's violations and one for each watcher that missed events."""
        for watcher in self._watchers:
            watcher.close()
        blind = [Violation("blind", type(watcher).__name__) for watcher in self._watchers if not watcher.sound]
        return [*blind, *check(self.ledger.events(), self.schedule, self.limits)]

    def finish(self) -> None:
        """Wait until all expected runs are done, no body runs and no lease is left; then run the checker."""
        with contextlib.suppress(AssertionError):  # the checker's message is clearer
            until(self._done, "all has run", 40, 0.1)
        until(self._idle, "no body runs", 60)
        until(lambda: not self._leases(), "no lease is left", self.limits.ttl + 10)
        found = self.verdict()
        assert not found, f"\n{table(found)}"

    def _done(self) -> bool:
        events = self.ledger.events()
        return not unfinished(events, bodies_of(events), self.schedule)

    def _idle(self) -> bool:
        over = {(e["run"], e["pid"]) for e in self.ledger.events("end")}
        dead = {e["of"] for e in self.ledger.events("death")}
        return all((e["run"], e["pid"]) in over or e["pid"] in dead for e in self.ledger.events("start"))

    def _leases(self) -> list[Any]:
        with contextlib.closing(self.client()) as client:
            return list(client.keys("*:lock:*"))

    def story(self) -> str:
        """Return the last events, the faults and the logs, for the report of a failure."""
        events = [event for event in self.ledger.events() if not event.get("sent")]
        faults = [
            {"what": f"FAULT {f.kind}", "at": f.at, "until": f.until, "pids": sorted(f.pids)} for f in self.schedule
        ]
        lines = [f"{e['at'] - events[0]['at']:9.3f} {e}" for e in sorted(events + faults, key=lambda e: e["at"])[-150:]]
        logs = [f"-- {w.name}\n{w.process.output()[-5000:]}" for w in self.workers]
        return "\n".join(lines + logs)


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Add environment variables for the processes that start within the block, except the warden."""
    warden.tell("undir", "nothing")  # so that it already runs
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def since(event: Event | Fault, at: float) -> float:
    """Return the seconds from an event or the start of a fault to a time."""
    return at - (event.at if isinstance(event, Fault) else float(event["at"]))


def kind_of(broker: str | RabbitMQServer) -> str:
    """Return the name of a kind of broker."""
    return broker if isinstance(broker, str) else "rabbitmq"


def side_by_side(*steps: Callable[[], Any]) -> list[Any]:
    """Run several steps that mostly wait in parallel, and return their results."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(steps)) as threads:
        return [future.result() for future in [threads.submit(step) for step in steps]]


__all__ = [
    "CHILD_BOUND",
    "FIGURES",
    "Worker",
    "WorkerEnvironment",
    "WorkerFailed",
    "kind_of",
    "now",
    "side_by_side",
    "since",
]
