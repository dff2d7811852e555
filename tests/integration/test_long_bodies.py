"""A lease lives as long as its work, without a configured duration.

The 90-second bodies start when this run begins (see ``ninety_seconds`` in conftest) and are checked
here, so that they cost little time of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import Celery
from pytest_celery import CeleryWorkerCluster

from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Recorder
from tests.integration.tasks import lock_tag
from tests.integration.watch import NinetySeconds, Watch
from tests.servers import RedisServer, until

pytestmark = pytest.mark.long
POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")


@pytest.fixture(scope="module", autouse=True)
def start_long_bodies(ninety_seconds: NinetySeconds) -> None:
    """Start the bodies of 90 s first: they run during the other tests of this file."""


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """Return the workers of the long bodies, and one for their duplicates."""
    return [
        WorkerSpec("threads", copy=1),
        WorkerSpec("prefork", concurrency=4, copy=2),
        WorkerSpec("gevent", copy=2),
        WorkerSpec("eventlet", copy=2),
    ]


#: Bodies that block the renewal thread: pool, act, and the event that reports its start.
HARD = {
    "gevent never yields": ("gevent", "spin", "start"),
    "eventlet never yields": ("eventlet", "spin", "start"),
    "a regex keeps the GIL": ("prefork", "regex", "regex"),
    "a call into C keeps the GIL": ("prefork", "keep_gil", "start"),
    "many calls into C keep the GIL": ("prefork", "keep_gil_often", "start"),
}

#: Seconds that each of them takes: four times the TTL. A TTL that outlives any moment of slowness would make them too long, so
#: they run alone.
HARD_SECONDS = 8.0


@pytest.fixture(scope="module")
def hard_bodies(
    celery_worker_cluster: CeleryWorkerCluster, celery_setup_app: Celery, recorder: Recorder, redis_server: RedisServer
) -> Callable[[str], Watch]:
    """Run all these bodies concurrently, and send duplicates to another worker until they end."""
    queues = {node.container.spec.pool: node.worker_queue for node in celery_worker_cluster}
    job = celery_setup_app.tasks["job.skip_short"]

    def watch(pool: str, act: str, begun: str) -> Watch:
        tag = f"hard-{secrets.token_hex(6)}"
        result = job.apply_async((tag, [act, "return"], HARD_SECONDS), queue=queues[pool])
        until(lambda: recorder.events(tag, begun), f"{act} has begun in {pool}")
        watch = Watch(job, tag, result, recorder, redis.Redis.from_url(redis_server.url()))
        watch.until_over(timeout=90)
        return watch

    with ThreadPoolExecutor(len(HARD)) as threads:
        watches = {name: threads.submit(watch, *case) for name, case in HARD.items()}
    return lambda name: watches[name].result()


def assert_never_lost(watch: Watch) -> None:
    """Check that the key always existed with the same holder, and that no duplicate ran."""
    assert [] == watch.missing
    assert watch.copies >= 3
    assert 1 == watch.starts
    assert [] == watch.lost


@pytest.mark.timed
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", HARD)
def test_hard_body(hard_bodies: Callable[[str], Watch], name: str) -> None:
    """A body that blocks the renewal thread of its process for four TTLs keeps its lock.

    In gevent and eventlet any computing body does so. In prefork a body that keeps the GIL does, and
    the main process renews for it.
    """
    watch = hard_bodies(name)
    assert_never_lost(watch)
    assert watch.duration >= HARD_SECONDS - 0.5


def test_renewal_ends_with_the_body(env: WorkerEnvironment) -> None:
    """After the body's end its key is released and no longer renewed, while the same thread renews for other bodies."""
    options = {"lock_options": {"lock_ttl": 6}}
    result = env.hold("skip_short", **options)
    until_renewed(env, 1)
    other = env.other_tag("other")
    env.hold("skip_short", other, **options)
    env.let_go()
    assert "held" == env.get(result)
    assert not env.is_locked("skip_short")
    until_renewed(env, 1 + renewals(env, other), other)
    until_renewed(env, 1 + renewals(env, other), other)
    assert not env.is_locked("skip_short")
    assert "lock_released" == env.lock_signals(env.key("skip_short"))[-1]["what"]


def test_renewed_every_third_of_the_ttl(env: WorkerEnvironment) -> None:
    """Each renewal sends a signal; there are no more of them than one for each third of the TTL of 2 s."""
    sent = time.monotonic()
    result = env.hold("skip_short")
    until_renewed(env, 4)
    env.let_go()
    env.get(result)
    assert renewals(env) <= (time.monotonic() - sent) / (2 / 3) + 1


def renewals(env: WorkerEnvironment, tag: str | None = None) -> int:
    """Return how often the lease of a job was renewed so far."""
    return len(env.lock_signals(env.key("skip_short", tag), "lock_renewed"))


def until_renewed(env: WorkerEnvironment, count: int, tag: str | None = None) -> None:
    """Wait until the lease of a job was renewed so often."""
    until(lambda: renewals(env, tag) >= count, f"{count} renewals")


def test_child_that_is_stopped_alone(env: WorkerEnvironment) -> None:
    """The main process renews the lease of a stopped child, so it is not lost."""
    queue = env.worker_of("prefork").worker_queue
    holder = env.hold("skip_short", queue=queue, lock_options={"lock_ttl": 12})
    child = env.starts()[0]["pid"]
    os.kill(child, signal.SIGSTOP)
    try:
        until_put_off(env, "skip_short", 2)  # the first of these may be the child's last renewal
        assert env.get(env.job("skip_short").delay(env.tag)) is None
    finally:
        os.kill(child, signal.SIGCONT)
    env.let_go()
    assert "held" == env.get(holder)
    assert [] == env.lock_signals(env.key("skip_short"), "lock_lost")
    assert 1 == len(env.starts())


def until_put_off(env: WorkerEnvironment, name: str, count: int) -> None:
    """Wait until the expiry of a job's lock was put off so often, and check that it never expires meanwhile."""
    with contextlib.closing(env.store()) as store:
        key, seen = env.key(name), []

        def put_off() -> int:
            seen.append(store.pttl(key))
            assert seen[-1] > 0, "the lock has expired"
            return sum(a < b for a, b in itertools.pairwise(seen))

        until(lambda: put_off() >= count, f"{count} renewals")


def test_failing_receivers_hurt_nothing(env: WorkerEnvironment) -> None:
    """Receivers of the library's signals that raise do not affect the lock or the result."""
    key = env.key("skip_short")
    env.recorder.raise_flag(f"{lock_tag(key)}.angry")
    held = env.hold("skip_short", lock_options={"lock_ttl": 9})
    assert env.get(env.job("skip_short").delay(env.tag)) is None
    until_renewed(env, 1)
    env.let_go()
    assert "held" == env.get(held)
    seen = {event["what"] for event in env.lock_signals(key)}
    assert seen >= {"lock_acquired", "lock_renewed", "lock_released", "duplicate"}
    assert "done" == env.get(env.job("skip_short").delay(env.tag))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("pool", POOLS)
def test_ninety_seconds(ninety_seconds: NinetySeconds, pool: str) -> None:
    """A body of 90 s keeps a lock whose TTL is much shorter, and no duplicate of it runs."""
    watch = ninety_seconds.watch(pool)
    assert_never_lost(watch)
    assert watch.duration >= 89
