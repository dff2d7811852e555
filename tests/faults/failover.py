"""Failover under load: a primary with replicas and Sentinels, its faults, and which bodies ran at once.

``python -m tests.faults.failover --rounds 10`` causes all faults in each round.
It fails if two bodies of a lock key ran at once, if a task failed, or if a lock is left.
With ``--without`` it shows what happens without the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import redis
from celery.result import AsyncResult
from kombu import pools

from celery_singleton_lock import locks
from tests.faults.counters import unbalanced
from tests.faults.harness import Worker
from tests.faults.ledger import Event, Ledger, now
from tests.faults.tasks import make_app
from tests.servers import (
    Process,
    RedisServer,
    free_port,
    new_directory,
    packaged_program,
    redis_program,
    remove_directory,
    until,
)

NAME = "locks"  # of the primary, for Sentinel
DOWN_AFTER = 2.0  # seconds
#: Users of replicas and Sentinels, which a partition shuts out. Clients have another one.
REPLICA, SENTINEL = "replica", "sentinel"
PASSWORD = "pa55"
#: What keeps a failover from having two bodies at once.
SETTINGS = {"singleton_lock_replicas": 1, "singleton_lock_grace": True}
#: Options of servers that refuse writes while they have no replica.
MIN_REPLICAS = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "2")
#: Seconds without a fault before the first one, so that all workers run bodies.
SETTLE = 6.0


def valkey_program() -> str:
    """Return the Valkey server, "" if there is none."""
    return packaged_program(["valkey-server"]) or ""


class Replicated:
    """A primary with replicas, watched by Sentinels.

    Arguments:
        program: of the servers; that of `RedisServer` unless given.
        replicas: how many.
        sentinels: how many; more than half of them decide.
        options: of each server.
    """

    def __init__(self, program: str = "", replicas: int = 2, sentinels: int = 1, options: Sequence[str] = ()) -> None:
        self._program = program or redis_program()
        self._stack = contextlib.ExitStack()
        self.directory = new_directory("sentinel")
        self._stack.callback(remove_directory, self.directory)
        try:
            first = self._server(options)
            behind = ("--replicaof", "127.0.0.1", str(first.port))
            self.servers = [first, *(self._server((*options, *behind)) for _ in range(replicas))]
            self._ports = [self._sentinel(number, first.port, sentinels // 2 + 1) for number in range(sentinels)]
            until(lambda: len(self.acknowledged(first)) == replicas, "the replicas are connected")
            until(lambda: self._knows(replicas, sentinels), "Sentinel knows all")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Replicated:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _server(self, options: Sequence[str]) -> RedisServer:
        users = [
            word for user in (REPLICA, SENTINEL) for word in ("--user", user, "on", f">{PASSWORD}", "~*", "&*", "+@all")
        ]
        own = ("--masteruser", REPLICA, "--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0")
        server = RedisServer(*users, *own, *options, program=self._program)
        return self._stack.enter_context(server)

    def _sentinel(self, number: int, port: int, quorum: int) -> int:
        own, path = free_port(), self.directory / f"{number}.conf"
        lines = [
            f"port {own}",
            "bind 127.0.0.1",
            f"dir {self.directory}",
            f"sentinel monitor {NAME} 127.0.0.1 {port} {quorum}",
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER * 1000:.0f}",
            f"sentinel failover-timeout {NAME} 10000",
            f"sentinel auth-user {NAME} {SENTINEL}",
            f"sentinel auth-pass {NAME} {PASSWORD}",
        ]
        path.write_text("\n".join(lines) + "\n")
        process = Process([self._program, str(path), "--sentinel"], self.directory / f"{number}.log")
        self._stack.callback(process.kill)
        process.start()
        return own

    def _knows(self, replicas: int, sentinels: int) -> bool:
        with contextlib.suppress(redis.RedisError):
            told = [self.ask(port, "SENTINEL MASTER", NAME) for port in self._ports]
            return all((one["num-slaves"], one["num-other-sentinels"]) == (replicas, sentinels - 1) for one in told)
        return False

    @property
    def url(self) -> str:
        """The URL of the store, as Celery spells it."""
        return ";".join(f"sentinel://127.0.0.1:{port}/0" for port in self._ports)

    @property
    def primary(self) -> RedisServer:
        """The server that the first Sentinel calls the primary."""
        port = int(self.ask(self._ports[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1])
        return next(server for server in self.servers if server.port == port)

    def ask(self, port: int, *words: str) -> Any:
        """Send a command to a server or Sentinel; return the reply."""
        with contextlib.closing(redis.Redis(port=port, decode_responses=True, socket_timeout=2)) as client:
            return client.execute_command(*words)

    def acknowledged(self, server: RedisServer) -> list[str]:
        """Return the replicas that a server has."""
        told = str(self.ask(server.port, "ROLE"))
        return [str(one.port) for one in self.servers if one is not server and str(one.port) in told]

    def fail_over(self, *words: str) -> None:
        """Have Sentinel change the primary, and wait until it has."""
        before = self.primary
        until(lambda: self._failed_over(words), "Sentinel begins a failover", 30)
        until(lambda: self.primary is not before, "another server is the primary")

    def _failed_over(self, words: Sequence[str]) -> bool:
        try:
            return self.ask(self._ports[0], "SENTINEL", "FAILOVER", NAME, *words) in (True, "OK")
        except redis.ResponseError:  # one is under way, or no replica is good enough yet
            return False

    def kill_primary(self, unreplicated: float = 0.0) -> RedisServer:
        """Kill the primary, whose replicas miss the writes of its last seconds; wait for another one, and return it."""
        before = self.primary
        if unreplicated:
            self._shut_out(before, REPLICA)
            time.sleep(unreplicated)
        before.stop()
        until(lambda: self.primary is not before, "another server is the primary")
        return before

    @contextlib.contextmanager
    def partition(self) -> Iterator[RedisServer]:
        """Within the block, replicas and Sentinels cannot reach the primary, and clients can; yield it."""
        before = self.primary
        self._shut_out(before, REPLICA, SENTINEL)
        yield before
        for user in (REPLICA, SENTINEL):
            self.ask(before.port, "ACL", "SETUSER", user, "+@all")

    def _shut_out(self, server: RedisServer, *users: str) -> None:
        for user in users:
            self.ask(server.port, "ACL", "SETUSER", user, "-@all")  # else they would become the default user
            self.ask(server.port, "CLIENT", "KILL", "USER", user)

    def heal(self) -> None:
        """Start what was killed, and wait until all are replicas of the primary."""
        for server in self.servers:
            if not server.is_running:
                server.start()
        primary = self.primary
        until(lambda: len(self.acknowledged(primary)) == len(self.servers) - 1, "all are its replicas", 90, 0.2)
        until(lambda: self._knows(len(self.servers) - 1, len(self._ports)), "Sentinel knows them")


class Pair(NamedTuple):
    """Two bodies of the same work at once.

    Arguments:
        at: when the second one began.
        lasted: seconds.
        told: seconds from then until one of them learned that it had lost its lock; None: never.
    """

    at: float
    lasted: float
    told: float | None


class Report(NamedTuple):
    """What was seen from a time on.

    Arguments:
        pairs: of bodies at once.
        pause: longest time in seconds without a start.
        lost: how many leases were lost.
        warnings: how many lines of level WARNING and above the workers logged.
        outages: how many of these are the first lines of an outage.
    """

    pairs: Sequence[Pair]
    pause: float
    lost: int
    warnings: int
    outages: int

    def __str__(self) -> str:
        silent = sum(pair.told is None for pair in self.pairs)
        ahead = sum(pair.told is not None and pair.told <= 0 for pair in self.pairs)
        return (
            f"pairs {len(self.pairs)} (silent {silent}, told before {ahead}), {self.pause:.1f} s without a start, "
            f"lost {self.lost}, warnings {self.warnings} (outages {self.outages})"
        )


class Load:
    """Workers with a replicated store, and a few messages for each lock key at any time.

    Arguments:
        store: of the locks.
        bodies: shortest and longest time in seconds that a body takes.
        keys: how many lock keys.
        task: name of the task.
        workers: how many.
        children: how many each of them has.
        waiting: how many messages wait for each lock key.
        conf: of the app.
    """

    def __init__(
        self,
        store: Replicated,
        bodies: tuple[float, float] = (8.0, 12.0),
        keys: int = 8,
        task: str = "retry",
        workers: int = 2,
        children: int = 6,
        waiting: int = 2,
        ttl: float = 3.0,
        **conf: Any,
    ) -> None:
        self.store, self.ttl = store, ttl
        self._bodies, self._keys, self._task, self._waiting = bodies, keys, task, waiting
        self.ledger = Ledger(new_directory("failover"))
        self.workers: list[Worker] = []
        self.results: list[AsyncResult] = []
        self._stack = contextlib.ExitStack()
        self._stack.callback(remove_directory, self.ledger.directory)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        try:
            broker = self._stack.enter_context(RedisServer())
            self.conf = {
                "broker_url": broker.url(),
                "result_backend": broker.url(1),
                "result_backend_transport_options": {"master_name": NAME},
                "singleton_lock_url": store.url,
                "singleton_lock_ttl": ttl,
                "faults_directory": str(self.ledger.directory),
                "worker_prefetch_multiplier": 1,
                "worker_max_tasks_per_child": 3,
                "broker_connection_retry_on_startup": True,
                **conf,
            }
            self.app = make_app(self.conf)
            self._stack.callback(pools.reset)
            self._stack.callback(self.app.close)
            self._start(workers, children)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, workers: int, children: int) -> None:
        for _ in range(workers):
            self.workers.append(Worker(self, "prefork", children, (), {}))  # type: ignore[arg-type]
        for worker in self.workers:
            worker.ready(self.app)
        self.begun = now()
        self._thread.start()
        until(lambda: len({event["tag"] for event in self.ledger.events("start")}) == self._keys, "each key starts")
        time.sleep(SETTLE)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        for worker in self.workers:
            worker.process.kill()
        self._stack.close()

    def _send(self) -> None:
        """Keep messages for each key on their way, besides the one that runs."""
        self.app.backend.result_consumer.cancel_for = lambda task_id: None  # each thread has a backend of its own
        count, sent = itertools.count(), [0] * self._keys
        least, most = self._bodies
        while not self._end.wait(0.1):
            ended = [event["work"] for event in self.ledger.events("end")]
            for number in range(self._keys):
                while sent[number] < ended.count(f"{self._task} k{number}") + 1 + self._waiting:
                    span = least + (most - least) * (next(count) * 0.618 % 1)
                    task = self.app.tasks[self._task]
                    self.results.append(task.apply_async((f"k{number}",), {"acts": [["sleep", span]]}))
                    sent[number] += 1

    def drain(self, timeout: float = 120.0) -> None:
        """Send nothing more, and wait until each message has ended in success, and no lock is left.

        A lock that only a replica had, and nobody holds, is gone after a TTL. What the counters say began has then ended.
        """
        self._end.set()
        self._thread.join()
        until(lambda: all(result.ready() for result in self.results), "all have ended", timeout, 0.5)
        failed = {result.id: str(result.result) for result in self.results if result.state != "SUCCESS"}
        assert not failed
        try:
            until(lambda: not self._locks(), "no lock is left", self.ttl + 5)
        except AssertionError:
            raise AssertionError(f"locks are left: {self._left()}") from None
        assert [] == unbalanced(locks.stats(self.app))

    def _left(self) -> list[Any]:
        port = self.store.primary.port
        return [(key, self.store.ask(port, "HGETALL", key), self.store.ask(port, "PTTL", key)) for key in self._locks()]

    def _locks(self) -> Any:
        with contextlib.suppress(redis.RedisError):
            return self.store.ask(self.store.primary.port, "KEYS", "*:lock:*")
        return True

    def starts(self, since: float = 0.0) -> list[float]:
        """Return when bodies have begun."""
        return [event["at"] for event in self.ledger.events("start") if event["at"] > since]

    def wait_for_starts(self, count: int, timeout: float = 60.0) -> None:
        """Wait until so many more bodies have begun."""
        before = now()
        until(lambda: len(self.starts(before)) >= count, f"{count} bodies begin", timeout, 0.1)

    def report(self, since: float) -> Report:
        """Return what was seen since a time."""
        begun = [since, *self.starts(since), now()]
        pause = max(later - earlier for earlier, later in itertools.pairwise(begun))
        texts = [line for worker in self.workers for line in worker.process.output().splitlines()]
        warnings = [line for line in texts if ": WARNING/" in line or ": ERROR/" in line]
        outages = [line for line in warnings if "The store of locks is unreachable" in line]
        lost = [event for event in self.ledger.events("lost") if event["at"] > since]
        pairs = [pair for pair in pairs_of(self.ledger.events()) if pair.at > since]
        return Report(pairs, pause, len(lost), len(warnings), len(outages))


def pairs_of(events: Sequence[Event]) -> list[Pair]:
    """Return the pairs of bodies of the same work that ran at once."""
    ends = {(event["run"], event["pid"]): event["at"] for event in events if event["what"] == "end"}
    lost: dict[str, float] = {}
    for event in events:
        if event["what"] == "lost":
            lost.setdefault(event["run"], event["at"])
    found, running = [], dict[str, list[Event]]()
    for event in sorted((event for event in events if event["what"] == "start"), key=lambda event: event["at"]):
        others = running.setdefault(event["work"], [])
        for other in others:
            end = ends.get((other["run"], other["pid"]), now())
            if end > event["at"]:
                own_end = ends.get((event["run"], event["pid"]), now())
                told = [lost[run] for run in (event["run"], other["run"]) if run in lost]
                known = min(told) - event["at"] if told else None
                found.append(Pair(event["at"], min(end, own_end) - event["at"], known))
        others.append(event)
    return found


# -- the faults ----------------------------------------------------------------------------------


def planned(load: Load) -> None:
    """A planned failover."""
    load.store.fail_over()


def coordinated(load: Load) -> None:
    """A planned failover in which the old primary takes part (Valkey)."""
    load.store.fail_over("COORDINATED")


def killed(load: Load) -> None:
    """The primary is killed; replicas miss the writes of its last 1.2 s."""
    load.store.kill_primary(1.2)
    time.sleep(load.ttl)


def partition(load: Load) -> None:
    """Replicas and Sentinels cannot reach the primary, while clients can, for 12 s."""
    with load.store.partition() as before:
        until(lambda: load.store.primary is not before, "another server is the primary")
        time.sleep(10)  # the fault lasts; about two seconds have passed


def stopped(load: Load) -> None:
    """The primary is stopped for 12 s."""
    before = load.store.primary
    before.pause()
    time.sleep(12)  # the fault
    before.resume()


def flushed(load: Load) -> None:
    """The store loses all its data."""
    load.store.ask(load.store.primary.port, "FLUSHALL")


FAULTS: dict[str, Callable[[Load], None]] = {
    fault.__name__: fault for fault in (planned, coordinated, killed, partition, stopped, flushed)
}


def run(load: Load, *faults: str, heal: bool = True) -> dict[str, Report]:
    """Cause faults one after the other; return a report of each.

    Arguments:
        heal: whether each lasts until all servers are replicas of one primary again.
    """
    found = {}
    for name in faults:
        since = now()
        FAULTS[name](load)
        if heal:
            load.store.heal()
        load.wait_for_starts(3)
        time.sleep(load.ttl)
        found[name] = load.report(since)
    return found


def _at_random(seconds: float, seed: int) -> Iterator[str]:
    """Yield faults until the time is over."""
    draw, end = random.Random(seed), now() + seconds
    while now() < end:
        yield draw.choice([name for name in FAULTS if name != coordinated.__name__])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds of faults; return 1 if two bodies ran at once in one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.failover", description=__doc__)
    parser.add_argument("faults", nargs="*", default=["planned", "killed", "partition"], help=", ".join(FAULTS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="faults at random for so long, instead of the named ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--valkey", action="store_true", help="on Valkey")
    parser.add_argument("--without", action="store_true", help="without the settings")
    parser.add_argument("--min-replicas", action="store_true", help="with min-replicas-to-write 1")
    parser.add_argument("--task", default="retry", help="of tests/faults/tasks.py")
    parser.add_argument("--bodies", type=float, nargs=2, default=(8.0, 12.0), help="shortest and longest, in seconds")
    given = parser.parse_args(arguments)
    conf = {} if given.without else SETTINGS
    options = MIN_REPLICAS if given.min_replicas else ()
    pairs = 0
    for number in range(given.rounds):
        with (
            Replicated(valkey_program() if given.valkey else "", options=options) as store,
            Load(store, tuple(given.bodies), task=given.task, **conf) as load,
        ):
            for name in given.faults if given.minutes is None else _at_random(given.minutes * 60, given.seed):
                (found,) = run(load, name).values()
                pairs += len(found.pairs)
                print(f"{number + 1} {name}: {found}", flush=True)
            load.drain()
            print(f"{number + 1} all {len(load.results)} tasks have succeeded, and no lock is left", flush=True)
    return int(pairs > 0 and not given.without)


if __name__ == "__main__":
    sys.exit(main())
