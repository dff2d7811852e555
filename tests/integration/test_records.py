"""What workers record: how runs ended, duplicates by policy, what was lost; and an operators' pauses, with real workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from celery import Celery, states
from redis import Redis

from celery_singleton_lock import DuplicateTask, SingletonTask, locks
from celery_singleton_lock.context import context_of
from celery_singleton_lock.store.records import LOSSES, OUTCOMES, Statistics
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec, wait_for_end
from tests.servers import RedisServer, until

pytestmark = pytest.mark.long

#: What a body does -> how its run is recorded, and with which error.
ENDS = {
    "return": ("success", ""),
    "raise": ("failure", "Boom: "),
    "ignore": ("other", ""),
    "reject": ("other", ""),
    "retry": ("retry", ""),
}


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {"singleton_lock_url": own_store.url()}


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def queue(env: WorkerEnvironment, pool: str) -> str:
    return str(env.worker_of(pool).worker_queue)


@pytest.fixture(autouse=True)
def balance(env: WorkerEnvironment, own_store: RedisServer) -> Iterator[None]:
    """Check after each test that each lease that began has ended, or is listed."""
    yield
    env.let_all_go()
    for task in locks.tasks(
        env.app
    ):  # bodies may go on, so the locks that are counted last may be newer than the counters
        until(lambda task=task: is_balanced(locks.stats(env.app, task)[0]), f"{task} is balanced")  # type: ignore[misc]


def is_balanced(found: Statistics) -> bool:
    begun, ended = (
        sum(map(found.sum, names))
        for names in (("acquired", "reacquired"), ("released", "expired", "released_by_operator"))
    )
    return begun == ended + found.held


def counted(env: WorkerEnvironment, name: str) -> Mapping[str, int]:
    """Return the counters of a job."""
    return locks.stats(env.app, f"job.{name}")[0].counters


def test_tasks_are_known(env: WorkerEnvironment) -> None:
    """A worker that starts makes its tasks and groups known, also those that have never run."""
    known = until(lambda: locks.tasks(env.app), "the tasks are known")
    assert {"job.skip", "job.publish", "customers", "exports"} <= set(known)
    assert not {"then", "group.bill"} & set(known)


@pytest.mark.parametrize("act", ENDS)
def test_ends(env: WorkerEnvironment, queue: str, act: str) -> None:
    """A run is recorded with its outcome, its node, and the beginning of its error."""
    before = counted(env, "skip")
    outcome, error = ENDS[act]
    sent = time.monotonic()
    result = env.job("skip").apply_async((env.tag, [act, "return"], 0.0), queue=queue)
    run = until(lambda: [run for run in locks.history(env.app, "job.skip") if run.task_id == result.id], "the run")[-1]
    assert (env.key(), outcome, error) == (run.key, run.outcome, run.error[: len(error)])
    assert 0 <= run.duration < time.monotonic() - sent
    name = f"released:{outcome}"
    assert counted(env, "skip")[name] > before.get(name, 0)
    assert outcome in OUTCOMES


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_killed_child(env: WorkerEnvironment) -> None:
    """The run of a killed child is recorded, with who it was."""
    result = env.hold("skip")
    (start,) = env.starts()
    env.kill_body(start)
    (run,) = until(lambda: [run for run in locks.history(env.app, "job.skip") if run.task_id == result.id], "the run")
    assert ("other", start["pid"]) == (run.outcome, run.pid)


@pytest.mark.parametrize("name", ["skip", "raising", "retry", "wait", "once_more", "replace", "join"])
def test_duplicates(env: WorkerEnvironment, queue: str, name: str) -> None:
    """Each message that finds its lock held is counted once for its policy, however often it comes back."""
    policy = {"raising": "raise", "once_more": "run_once_more"}.get(name, name)
    before = counted(env, name).get(f"duplicates:{policy}", 0)
    env.hold(name, queue=queue, lock_options={"lock_ttl": 60})
    results = [env.job(name).apply_async((env.tag,), queue=queue) for _ in range(2)]
    until(lambda: counted(env, name).get(f"duplicates:{policy}", 0) == before + 2, "both are counted")
    (lock,) = locks.find(env.app, f"job.{name}")
    assert 2 == lock.duplicates
    env.let_go()
    until(lambda: any(result.ready() for result in results), "one of them has ended")
    assert before + 2 == counted(env, name)[f"duplicates:{policy}"]


def test_waited(env: WorkerEnvironment, queue: str) -> None:
    """The time that a message has waited is counted when it starts."""

    def waits() -> int:
        return sum(n for name, n in counted(env, "wait").items() if name.startswith("wait:"))

    before = waits()
    env.hold("wait", queue=queue, lock_options={"lock_ttl": 60})
    result = env.job("wait").apply_async((env.tag,), queue=queue)
    until(lambda: [lock for lock in locks.find(env.app, "job.wait") if lock.waiting], "it waits")
    env.let_go()
    env.get(result)
    assert before + 1 == waits()


def test_lost(env: WorkerEnvironment, queue: str) -> None:
    """A process that lost a lease reports it at once, with the reason."""
    job = env.job("skip_short")
    env.hold("skip_short", queue=queue, lock_options={"lock_ttl": 6})
    before = counted(env, "skip_short").get("lost:released_by_operator", 0)
    job.force_unlock(env.tag)  # type: ignore[attr-defined]
    until(
        lambda: before + 1 == counted(env, "skip_short").get("lost:released_by_operator"),
        "it is counted while the body goes on",
    )
    assert env.lock_signals(env.key("skip_short"), "lock_lost")
    assert "released_by_operator" in LOSSES
    env.let_go()
    env.finish_node(queue)


def test_lost_while_the_store_was_away(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """A lease that was lost in an outage, and failed renewals, are reported once the store answers."""
    env.hold("skip_short", queue=queue)
    before = counted(env, "skip_short")
    own_store.pause()
    until(lambda: env.lock_signals(env.key("skip_short"), "lock_lost"), "it is lost")
    own_store.resume()
    for name in ("lost:expired", "renewal_failures", "store_errors:renew"):
        until(lambda name=name: counted(env, "skip_short").get(name, 0) > before.get(name, 0), name)  # type: ignore[misc]
    env.let_go()
    env.finish_node(queue)


def test_renewals(env: WorkerEnvironment, queue: str) -> None:
    """Renewals are reported while the body runs."""
    before = counted(env, "skip_shortest").get("renewals", 0)
    env.hold("skip_shortest", queue=queue)
    until(
        lambda: counted(env, "skip_shortest").get("renewals", 0) > before + 30, "renewals are reported more than once"
    )
    assert [] == [line for node in env.setup.worker_cluster for line in node.lines("met an error")]


@pytest.mark.parametrize("pool", ["prefork", "threads"], indirect=True)
def test_renewals_before_the_end(
    env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], pool: str
) -> None:
    """A worker that stops reports at its end, though it has renewed a lease only a moment before."""
    before = counted(env, "told").get("renewals", 0)
    node = fresh_worker(WorkerSpec(pool, concurrency=1))
    result = env.hold("told", queue=node.worker_queue, lock_options={"lock_ttl": 9})
    until(lambda: env.lock_signals(env.key("told"), "lock_renewed"), "it is renewed")
    env.let_go()
    assert "held" == env.get(result)
    node.kill("SIGTERM")  # a warm shutdown
    assert 0 == wait_for_end(node.container, 60)
    assert counted(env, "told").get("renewals", 0) > before


@pytest.mark.parametrize("newcomer", [False, True])
def test_success_after_a_loss(env: WorkerEnvironment, queue: str, newcomer: bool) -> None:
    """A body that goes on without its lease, and succeeds, is recorded as a success; its run says what became of the lease."""
    result = env.hold("skip_short", queue=queue, lock_options={"lock_ttl": 9})
    before = counted(env, "skip_short").get("last_success", 0)
    env.job("skip_short").force_unlock(env.tag)  # type: ignore[attr-defined]
    if newcomer:
        assert "done" == env.get(env.job("skip_short").apply_async((env.tag, "return"), queue=queue))
    until(lambda: env.lock_signals(env.key("skip_short"), "lock_lost"), "the loss is noticed")
    newer = counted(env, "skip_short").get("last_success", 0)
    env.let_go()
    assert "held" == env.get(result)

    def runs() -> list[locks.Run]:
        return [run for run in locks.history(env.app, "job.skip_short") if run.task_id == result.id]

    until(lambda: counted(env, "skip_short").get("last_success", 0) > max(before, newer), "the success is recorded")
    assert [("success", "released_by_operator")] == [(run.outcome, run.lease) for run in runs()]


def test_success_after_an_expiry(env: WorkerEnvironment, queue: str, own_store: RedisServer) -> None:
    """So is one whose lease has expired while the store was away, as soon as the store can be reached."""
    result = env.hold("skip_short", queue=queue)
    own_store.pause()
    until(lambda: env.events() and env.lock_signals(env.key("skip_short"), "lock_lost"), "the lease is lost")
    env.let_go()
    assert "held" == env.get(result)
    own_store.resume()

    def ended() -> list[tuple[str, str]]:
        runs = [run for run in locks.history(env.app, "job.skip_short") if run.task_id == result.id]
        return [(run.outcome, run.lease) for run in runs if run.outcome == "success"]

    assert [("success", "expired")] == until(ended, "the run", 30)
    assert counted(env, "skip_short")["last_success"] > 0


def test_error_that_is_no_text(env: WorkerEnvironment, queue: str) -> None:
    """An error with a name of a file that is no valid text is recorded, and the lock is released."""
    result = env.job("skip").apply_async((env.tag, ["raise_undecodable"]), queue=queue)
    assert "FileNotFoundError" == type(env.error(result)).__name__
    (run,) = until(lambda: [run for run in locks.history(env.app, "job.skip") if run.task_id == result.id], "the run")
    assert ("failure", "FileNotFoundError: caf\\udce9") == (run.outcome, run.error)
    assert not env.is_locked()


def test_lock_until_start(env: WorkerEnvironment, queue: str) -> None:
    """A lock that is released at the start says nothing of the end of its body."""
    env.get(env.job("publish_until_start").apply_async((env.tag,), queue=queue))
    found = counted(env, "publish_until_start")
    assert found["released:started"] == found["acquired"]
    assert not [name for name in found if name.startswith(("hold", "last_success"))]
    assert [] == locks.history(env.app, "job.publish_until_start")


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", ["publish", "publish_raise", "publish_chosen"])
def test_calls_that_are_not_sent(env: WorkerEnvironment, queue: str, name: str, held: bool) -> None:
    """A call that meets the lock at its publish is counted once, whether it is sent or not."""
    job, policy = env.job(name), {"publish": "skip", "publish_raise": "raise"}.get(name, "callable")

    def count() -> int:
        context_of(env.app).report_counts()  # which this process would do some seconds later
        return counted(env, name).get(f"duplicates:{policy}", 0)

    before = count()
    if held:
        locks.pause(env.app, 600.0, key=env.key(name))
    else:
        env.hold(name, queue=queue)
    if name != "publish":
        with pytest.raises(DuplicateTask):
            job.apply_async((env.tag,), queue=queue)
    else:
        result = job.apply_async((env.tag,), queue=queue)
        if held:
            assert env.get(result) is None
    locks.resume(env.app, key=env.key(name))
    assert before + 1 == count()


@pytest.mark.parametrize(
    ("settings", "kept", "counts"),
    [
        ({"singleton_lock_history": 2}, 2, True),
        ({"singleton_lock_history": 0}, 0, True),
        ({"singleton_lock_stats": False}, 0, False),
    ],
    ids=["history", "no history", "stats"],
)
def test_settings(own_store: RedisServer, settings: dict[str, Any], kept: int, counts: bool) -> None:
    """One setting says how many runs are kept, another one switches all records off."""
    app = Celery(set_as_current=False, broker="memory://")
    app.conf.update(singleton_lock_url=own_store.url(), singleton_lock_eager=True, **settings)

    @app.task(base=SingletonTask, name=(name := f"settings.{kept}{counts}"), shared=False)
    def task() -> None: ...

    for _ in range(5):
        task.apply()
    with Redis.from_url(own_store.url()) as client, closing(app):
        keys = [f"singleton:{{{name}}}:{part}" for part in ("stats", "registry", "history")]
        assert (counts, kept) == (bool(client.exists(keys[0])), client.llen(keys[2]))
        assert not client.exists(keys[1])


# -- an operators' pauses -----------------------------------------------------------------------


@pytest.fixture
def paused(env: WorkerEnvironment, request: pytest.FixtureRequest) -> Iterator[str]:
    """Pause the lock key of a job; resume it in the end."""
    locks.pause(env.app, 600.0, key=env.key(request.param))
    yield request.param
    locks.resume(env.app, key=env.key(request.param))


@pytest.mark.parametrize("paused", ["skip", "raising"], indirect=True)
def test_pause_ends_duplicates(env: WorkerEnvironment, queue: str, paused: str) -> None:
    """During a pause a task is skipped, or fails, as a duplicate of a holder in the state paused."""
    result = env.job(paused).apply_async((env.tag,), queue=queue)
    if paused == "skip":
        assert (None, states.SUCCESS) == (env.get(result), result.state)
    else:
        error = env.error(result)
        assert isinstance(error, DuplicateTask)
        assert "paused" == error.holder.state
    assert [] == env.starts()
    assert [event["what"] for event in env.lock_signals(env.key(paused))] == ["duplicate"]


@pytest.mark.parametrize("name", ["retry", "wait_short_ttl", "once_more_short", "replace_short", "join"])
def test_pause_lets_others_wait(env: WorkerEnvironment, queue: str, name: str) -> None:
    """A task that waits, comes back or joins runs once the pause has ended, and is counted once."""
    policy = {"wait_short_ttl": "wait", "once_more_short": "run_once_more", "replace_short": "replace"}.get(name, name)
    before = counted(env, name).get(f"duplicates:{policy}", 0)
    locks.pause(env.app, 600.0, key=env.key(name))
    result = env.job(name).apply_async((env.tag,), queue=queue)
    until(lambda: env.lock_signals(env.key(name), "duplicate"), "it met the pause")
    assert [] == env.starts()
    locks.pause(env.app, 0.5, key=env.key(name))  # in its place, and it ends by itself
    assert "done" == env.get(result)
    assert 1 == len(env.starts())
    assert counted(env, name)[f"duplicates:{policy}"] == before + 1


def test_early_resume(env: WorkerEnvironment, queue: str) -> None:
    """A task that comes back looks again during an operator's pause, which may be lifted early."""
    locks.pause(env.app, 3600.0, key=env.key("retry"))
    result = env.job("retry").apply_async((env.tag,), queue=queue)
    until(lambda: env.lock_signals(env.key("retry"), "duplicate"), "it met the pause")
    locks.resume(env.app, key=env.key("retry"))
    assert "done" == env.get(result)


def test_pause_of_a_task(env: WorkerEnvironment, queue: str) -> None:
    """A pause of a task lets its bodies go on that run, and no other start, until it is lifted."""
    first = env.hold("retry", queue=queue)
    locks.pause(env.app, 600.0, task="job.retry")
    other = env.job("retry").apply_async((env.other_tag("b"),), queue=queue)
    until(lambda: env.lock_signals(env.key("retry", env.other_tag("b")), "duplicate"), "it met the pause")
    env.let_go()
    assert "held" == env.get(first)
    assert [] == env.starts(env.other_tag("b"))
    assert locks.resume(env.app, task="job.retry")
    assert "done" == env.get(other)


def test_publish_in_a_pause(env: WorkerEnvironment, queue: str) -> None:
    """A call with `lock_from="publish"` is sent during a pause, as there is no other result, and is skipped when it comes."""
    locks.pause(env.app, 600.0, key=env.key("publish"))
    result = env.job("publish").apply_async((env.tag,), queue=queue)
    assert "paused" == result.duplicate.state
    assert env.get(result) is None
    assert [] == env.starts()
    locks.resume(env.app, key=env.key("publish"))
    assert "done" == env.get(env.job("publish").apply_async((env.tag,), queue=queue))


def test_statistics_of_a_cooldown(env: WorkerEnvironment) -> None:
    """The cooldown of `lock_at_least` is no lease, also in the second for which its entry outlives its key."""
    assert "done" == env.get(env.job("throttled").apply_async((env.tag,)))
    found: Statistics = locks.stats(env.app, "job.throttled")[0]
    assert (0, {"cooldown": 1}) == (found.held, dict(found.states))
    with closing(env.store()) as client:
        client.delete(env.key("throttled"))
    found = locks.stats(env.app, "job.throttled")[0]
    assert (0, {}) == (found.held, dict(found.states))


def test_statistics_of_a_limit(env: WorkerEnvironment, queue: str) -> None:
    """The locks of several holders of a lock are listed one by one."""
    until(lambda: not locks.find(env.app, "job.limit"), "what an earlier test has let go has ended")
    for _ in range(2):
        env.hold("limit", acts=("hold", "hold"), queue=queue)
    found: Statistics = locks.stats(env.app, "job.limit")[0]
    assert (2, {"running": 2}) == (found.held, dict(found.states))
    assert 2 == len({lock.key for lock in locks.find(env.app, "job.limit")})
    assert found.oldest > 1e9
