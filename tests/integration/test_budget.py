"""The store commands of a task: two when it runs, one when it is a duplicate, and no new connection.

The commands of each policy are in three tables: `RUNS`, `DUPLICATES` and `PUBLISHED`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import redis
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask, RetryLater
from celery_singleton_lock.policies import NAMED
from tests.in_time import in_time
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.monitor import Monitor
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import RedisServer, until

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")
#: Seconds: no lease with this TTL is renewed, and none expires, during a test.
LONG = 600.0


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """One child, so that a warmed-up worker is warm altogether.

    Elsewhere one at a time would do too, but then Celery may look for the next message after 2 s only.
    """
    return [WorkerSpec(pool, concurrency=1 if pool in ("prefork", "solo") else 4) for pool in POOLS]


@pytest.fixture(params=POOLS)
def queue(request: pytest.FixtureRequest, env: WorkerEnvironment) -> str:
    """Return the queue of a worker that has already run each of these tasks."""
    queue = str(env.worker_of(request.param).worker_queue)
    for name in ("skip", "raising", "retry", "long"):
        env.get(env.job(name).apply_async((env.other_tag("warm"),), queue=queue))
    return queue


def elsewhere(env: WorkerEnvironment, queue: str) -> str:
    """Return the queue of a worker other than that of ``queue``, warmed up too."""
    nodes = (node for node in env.setup.worker_cluster if node.worker_queue != queue)
    other = str(next(nodes).worker_queue)
    env.get(env.job("long").apply_async((env.other_tag("warm"),), queue=other))
    return other


def test_a_run_costs_two_commands(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """A run sends acquire and release, and nothing else, whether it succeeds or fails."""
    with Monitor(own_store.url()) as monitor:
        env.get(env.job("long").apply_async((env.tag,), queue=queue))
        env.finish_node(queue)
    assert (2, 0) == (len(monitor.commands), monitor.connections), monitor.commands
    with Monitor(own_store.url()) as monitor:
        env.error(env.job("long").apply_async((env.tag, "raise"), queue=queue))
        env.finish_node(queue)
    assert (2, 0) == (len(monitor.commands), monitor.connections), monitor.commands


@pytest.mark.parametrize("name", ["long", "raising", "impatient"], ids=["skip", "raise", "retry"])
def test_a_duplicate_costs_one_command(env: WorkerEnvironment, queue: str, own_store: RedisServer, name: str) -> None:
    """A duplicate sends one refused acquire for each delivery; the answer includes the holder."""
    holder = env.hold(name, queue=elsewhere(env, queue), lock_options={"lock_ttl": LONG})
    with Monitor(own_store.url()) as monitor:
        env.job(name).apply_async((env.tag,), queue=queue).get(timeout=SOON, propagate=False)
        env.finish_node(queue)
    env.let_go()  # its release is not for the next test's monitor
    env.get(holder)
    deliveries = len(env.lock_signals(env.key(name), "duplicate"))
    assert (deliveries, 0) == (len(monitor.commands), monitor.connections), monitor.commands
    assert deliveries > 1 if name == "impatient" else deliveries == 1


@pytest.mark.parametrize("name", ["throttled", "once", "tried", "capped_long"])
def test_options_cost_no_command(env: WorkerEnvironment, queue: str, own_store: RedisServer, name: str) -> None:
    """A cooldown, counted starts and a cap cost no command more; a duplicate in a cooldown costs one."""
    job = env.job(name)
    env.get(job.apply_async((env.other_tag("warm"),), queue=queue))
    with Monitor(own_store.url()) as monitor:
        env.get(job.apply_async((env.tag,), queue=queue))
        env.finish_node(queue)
    assert (2, 0) == (len(monitor.commands), monitor.connections), monitor.commands
    if name == "throttled":  # its cooldown lasts for ten minutes
        with Monitor(own_store.url()) as monitor:
            assert env.get(job.apply_async((env.tag,), queue=queue)) is None
            env.finish_node(queue)
        assert (1, 0) == (len(monitor.commands), monitor.connections), monitor.commands


def test_an_idle_worker_costs_nothing(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """A worker without leases sends no commands, and plain tasks send none."""
    with Monitor(own_store.url()) as monitor:
        plain = env.job("plain").apply_async((env.tag, "sleep", 1.0), queue=queue)
        assert "slept" == env.get(plain)
    assert ([], 0) == (monitor.commands, monitor.connections)


def test_nothing_stays_behind(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """All keys that remain after many different lock keys expire, except those that a task name has once."""
    results = [env.job("skip").apply_async((env.other_tag(str(number)),), queue=queue) for number in range(50)]
    for result in results:
        env.get(result)
    client = redis.Redis.from_url(own_store.url())
    until(lambda: not list(client.scan_iter("*{job.skip}:lock:*")), "no lock is left")
    once = (b":fence", b":registry", b":stats", b":history", b"singleton:tasks")
    assert [] == [key for key in client.scan_iter("*") if client.ttl(key) == -1 and not key.endswith(once)]
    client.close()


# -- the commands of each policy -------------------------------------------------------------------

#: Options of a holder whose lease is not renewed while commands are counted.
HOLDS = {"lock_options": {"lock_ttl": LONG}}
#: A job of each policy, and of other options -> the commands of a run without a duplicate.
RUNS = {
    "long": "acquire release",
    "raising": "acquire release",
    "retry": "acquire release",
    "wait_long": "acquire release",
    "once_more": "acquire release",
    "join": "acquire release",
    "replace": "acquire release",
    "limit": "acquire release",
    "limit_wait_long": "acquire release",
    "once_more_latest": "acquire release",
    "publish": "acquire acquire release",  # the first one in the publisher
    "everything": "acquire acquire release",
}


class Duplicate(NamedTuple):
    """What a duplicate costs.

    Arguments:
        job: its task.
        logged: a part of the log line that tells that it is decided, or stands in line.
        decided: the commands until then.
        afterwards: the commands from the holder's release on, which is not in them, until nothing is left of the duplicate.
        look: the commands of each delivery between the first and the last, where their number depends on the time.
        options: of the call.
        holders: how many bodies hold the lock.
    """

    job: str
    logged: str
    decided: str
    afterwards: str = ""
    look: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    holders: int = 1


#: The holder's release names the message that it starts. The last acquire is the delayed copy's, which is dropped.
FROM_THE_LINE = "acquire release acquire"
#: Policy, or options -> what a duplicate costs that finds its lock held.
DUPLICATES = {
    "skip": Duplicate("long", "skipped", "acquire"),
    "raise": Duplicate("raising", "failed as a duplicate", "acquire"),
    "retry": Duplicate(
        "retry", "waits", "acquire", "acquire release", "acquire", {"on_duplicate": RetryLater(delay=0.5, backoff=1.0)}
    ),
    "wait": Duplicate("wait_long", "waits in line", "acquire acquire", FROM_THE_LINE),
    "run_once_more": Duplicate("once_more", "waits in line", "acquire acquire", FROM_THE_LINE),
    "run_once_more, latest": Duplicate("once_more_latest", "waits in line", "acquire acquire", FROM_THE_LINE),
    "join": Duplicate("join", "follows", "acquire", look="holder"),
    "replace": Duplicate("replace", "waits in line", "acquire acquire", FROM_THE_LINE),
    "lock_limit=3": Duplicate("limit", "skipped", "acquire", options={"on_duplicate": "skip"}, holders=3),
    "lock_limit=3, wait": Duplicate("limit_wait_long", "waits in line", "acquire acquire", FROM_THE_LINE, holders=3),
    'lock_from="publish", wait': Duplicate(
        "publish", "waits in line", "acquire acquire acquire", FROM_THE_LINE, options={"on_duplicate": "wait"}
    ),
    "all options": Duplicate("everything", "waits in line", "acquire acquire acquire", FROM_THE_LINE),
}
#: Policy -> the commands of a duplicate at its publish, and how many messages are sent.
PUBLISHED = {
    "skip": ("acquire", 0),
    "raise": ("acquire", 0),
    "retry": ("acquire", 1),
    "wait": ("acquire", 1),
    "run_once_more": ("acquire", 1),
    "join": ("acquire", 1),
    "replace": ("acquire", 1),
}


def in_few_pools(names: Iterable[str], *in_threads: str) -> pytest.MarkDecorator:
    """Run a test for all names in a prefork worker, and for some in one with threads."""
    rows = [*(("prefork", name) for name in names), *(("threads", name) for name in in_threads)]
    return pytest.mark.parametrize(("queue", "name"), rows, indirect=["queue"])


def scripts_of(commands: Sequence[str]) -> list[str]:
    """Return the verbs of these commands, as their keys tell them, without renewals and reports of what was counted.

    A script that the server does not know is sent again as EVAL.
    """
    verbs = []
    for command in commands:
        kind, _, *words = command.split(" ")
        if kind == "EVALSHA":
            keys = " ".join(words[1 : 1 + int(words[0])])
            verb = next((verb for verb, parts in VERBS.items() if all(part in keys for part in parts)), "holder")
            verbs += [verb] * (verb not in ("renew", "count"))
        elif kind != "EVAL":
            verbs.append(kind)
    return verbs


#: Script -> parts of the keys that it has, and those above it have not.
VERBS = {
    "acquire": (":fence", ":completed:"),
    "reacquire": (":fence",),
    "release": (":completed:",),
    "renew": (":revoked",),
    "leave": (":used",),
    "count": (":stats",),
}


def wait_until_idle(env: WorkerEnvironment, node: LocalWorkerNode) -> None:
    """Wait until a worker has no message left, delayed ones and those in its queue included."""
    inspect, name = env.app.control.inspect([node.hostname()], timeout=SOON), node.hostname()
    states = (inspect.scheduled, inspect.reserved, inspect.active)  # in the order in which a message has them

    def is_idle() -> bool:
        with contextlib.closing(redis.Redis.from_url(env.app.conf.broker_url)) as broker:
            return not broker.exists(node.worker_queue) and all((ask() or {name: True})[name] == [] for ask in states)

    until(lambda: is_idle() and is_idle(), f"{name} has nothing left")


def test_the_text_of_a_script_is_no_command(own_store: RedisServer) -> None:
    """A script that is sent as a text, with any brackets, is read as one command of its sender."""
    client = redis.Redis.from_url(own_store.url())
    client.ping()
    with contextlib.closing(client), Monitor(own_store.url()) as monitor:
        client.eval("local list = {KEYS[1] , ARGV[1] } return #list", 1, "key", "argument")
    assert ["EVAL"] == [command.split(" ")[0] for command in monitor.commands]


def test_every_policy_is_counted() -> None:
    """Each policy that has a name is in the tables."""
    assert {DUPLICATES[policy].job for policy in NAMED} <= set(RUNS)
    assert set(NAMED) == set(PUBLISHED)


@in_few_pools(RUNS, "wait_long", "replace")
def test_commands_of_a_run(env: WorkerEnvironment, queue: str, own_store: RedisServer, name: str) -> None:
    """A run without a duplicate costs two commands under each policy, and one more where the lock is acquired at publish."""
    with Monitor(own_store.url()) as monitor:
        env.get(env.job(name).apply_async((env.tag,), queue=queue))
        env.finish_node(queue)
    assert RUNS[name].split() == scripts_of(monitor.commands)


@in_few_pools(DUPLICATES, "raise", "wait", "join")
def test_commands_of_a_duplicate(env: WorkerEnvironment, queue: str, own_store: RedisServer, name: str) -> None:
    """A duplicate costs these commands until it is decided or stands in line, and these in the rest of its life."""
    cost, node = DUPLICATES[name], next(node for node in env.setup.worker_cluster if node.worker_queue == queue)
    decided, afterwards, result = in_time(lambda ttl: commands_before_a_copy(env, own_store, node, cost, ttl))
    assert cost.decided.split() == decided
    afterwards.remove("release")  # the holder's
    looks = len(node.lines(result.id, "received")) - 2 if cost.look else 0
    assert [*[cost.look] * looks, *cost.afterwards.split()] == afterwards


def commands_before_a_copy(
    env: WorkerEnvironment, own_store: RedisServer, node: LocalWorkerNode, cost: Duplicate, ttl: float
) -> tuple[list[str], list[str], AsyncResult] | None:
    """Let a duplicate meet its holders, and one of these end before the duplicate's delayed copy comes.

    Return the commands until it is decided, and those after that, and the duplicate; None if the copy may have come earlier.
    """
    tag, job = env.other_tag(f"{ttl:g}"), env.job(cost.job)
    elsewhere = env.worker_of("gevent").worker_queue
    holders = [env.hold(cost.job, tag, "hold_own", queue=elsewhere, **HOLDS) for _ in range(cost.holders)]
    with Monitor(own_store.url()) as monitor:
        sent = time.monotonic()
        options = {"lock_options": {**cost.options, "lock_ttl": ttl}}
        result = job.apply_async((tag,), queue=node.worker_queue, **options)
        node.wait_for_lines(result.id, cost.logged)
        decided = scripts_of(monitor.so_far())
        if cost.look:
            decided = decided[: len(cost.decided.split())]  # it may have looked already
            node.wait_for_lines(result.id, "received", count=3)
        cooldown_ends = env.starts(tag)[0]["at"] + (getattr(job, "lock_at_least", 0) or 0)
        until(lambda: time.monotonic() > cooldown_ends, "the holder's end leaves no cooldown")
        env.let_go(holders[0].id)
        env.get(holders[0])
        came_late = time.monotonic() > sent + ttl and not cost.look
        result.get(timeout=SOON, propagate=False)
        wait_until_idle(env, node)
        expected = len(cost.decided.split()) + len(cost.afterwards.split()) + 1  # the holder's release
        until(
            lambda: len(scripts_of(monitor.so_far())) >= expected,
            "its copy has come: the worker keeps it beside its pool",
        )
    env.let_go(tag)
    for holder in holders:
        env.get(holder)
    return None if came_late else (decided, scripts_of(monitor.commands)[len(decided) :], result)


@pytest.mark.parametrize("queue", ["eventlet"], indirect=True)
def test_commands_where_another_waits(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """Under run_once_more, a duplicate costs one command if another one waits already.

    The copy of the one that waits comes after a minute, to a worker that no other test here waits for.
    """
    node, elsewhere, job = env.worker_of("eventlet"), env.worker_of("gevent").worker_queue, env.job("once_more")
    env.hold("once_more", queue=elsewhere, **HOLDS)
    waiting = job.apply_async((env.tag,), queue=queue, **HOLDS)
    node.wait_for_lines(waiting.id, "waits in line")
    with Monitor(own_store.url()) as monitor:
        assert env.get(job.apply_async((env.tag,), queue=queue, **HOLDS)) is None
    env.let_go()
    env.get(waiting)
    assert ["acquire"] == scripts_of(monitor.commands)


@pytest.mark.parametrize("queue", ["prefork"], indirect=True)
def test_commands_of_a_replaced_holder(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """Under replace, a holder that stops costs no command more: its release names who replaces it."""
    node, elsewhere = env.worker_of("prefork"), env.worker_of("gevent").worker_queue
    duplicate = DUPLICATES["replace"]
    expected = [*duplicate.decided.split(), *duplicate.afterwards.split(), "release"]

    def attempt(ttl: float) -> list[str] | None:
        tag = env.other_tag(f"{ttl:g}")
        first = env.hold("replace_told", tag, queue=elsewhere, **HOLDS)
        with Monitor(own_store.url()) as monitor:
            sent = time.monotonic()
            second = env.job("replace_told").apply_async((tag,), queue=queue, lock_options={"lock_ttl": ttl})
            env.get(second)
            came_late = time.monotonic() > sent + ttl
            env.wait_for_state(first, "REVOKED")
            wait_until_idle(env, node)
            until(lambda: len(scripts_of(monitor.so_far())) >= len(expected), "its copy has come")
        return None if came_late else scripts_of(monitor.commands)

    assert sorted(expected) == sorted(in_time(attempt))


@pytest.mark.parametrize("policy", PUBLISHED)
def test_commands_of_a_duplicate_publish(env: WorkerEnvironment, own_store: RedisServer, policy: str) -> None:
    """With `lock_from="publish"` a duplicate costs its publisher one command; under skip and raise it is not sent."""
    job, queue = env.job("publish"), env.other_tag("nobody")
    options = {"queue": queue, "lock_options": {"on_duplicate": policy}}
    first = job.apply_async((env.tag,), **options)
    with Monitor(own_store.url()) as monitor, env.captured_messages() as messages:
        try:
            assert first.id == job.apply_async((env.tag,), **options).duplicate.task_id
        except DuplicateTask:
            assert policy == "raise"
    with env.app.connection_for_write() as connection:
        connection.default_channel.queue_purge(queue)
    commands, sent = PUBLISHED[policy]
    assert (commands.split(), sent) == (scripts_of(monitor.commands), len(messages))
