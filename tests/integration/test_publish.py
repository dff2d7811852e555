"""Locks that are acquired when a task is published (``lock_from="publish"``)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, NoReturn

import pytest
from celery import Celery, chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from celery_singleton_lock import DuplicateTask, Holder, StoreUnavailable
from celery_singleton_lock import signals as lock_signals
from celery_singleton_lock.line.joining import LONGEST_COPY_DELAY
from celery_singleton_lock.store.redis.store import RedisStore
from celery_singleton_lock.store.requests import LeaseSpec
from tests.in_time import in_time
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.tasks import make_app
from tests.servers import until

#: Seconds by which an expiry may be rounded.
ROUNDING = 1.0


@pytest.fixture(scope="module", params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nowhere(env: WorkerEnvironment) -> str:
    """Return a queue that no worker reads."""
    return f"nowhere-{env.tag}"


def messages(env: WorkerEnvironment, queue: str) -> int:
    with env.app.connection_for_read() as connection:
        try:
            return int(connection.default_channel.queue_declare(queue, passive=True)[1])
        except connection.channel_errors:
            return 0


def holder(env: WorkerEnvironment, name: str = "publish") -> Holder | None:
    return env.job(name).lock_holder(env.tag)  # type: ignore[attr-defined, no-any-return]


def queued(env: WorkerEnvironment, result: AsyncResult, name: str = "publish") -> float:
    """Check that a message has the lock and nobody runs it; return the seconds until that ends."""
    found = holder(env, name)
    assert found is not None
    assert (result.id, "queued", 0) == (found.task_id, found.state, found.pid)
    return found.remaining


def lasts(remaining: float, seconds: float, since: float) -> bool:
    """Tell whether so many seconds remain of what began to last ``seconds`` at some moment since then."""
    return seconds - (time.monotonic() - since) - ROUNDING <= remaining <= seconds


def revoke(env: WorkerEnvironment, result: AsyncResult) -> None:
    """Revoke a message at its own worker. From Celery 5.7 on, others would store REVOKED for it, each with its own serializer."""
    env.app.control.revoke(result.id, destination=[env.worker.hostname()], reply=True, timeout=SOON)


# -- what a publisher sees -------------------------------------------------------------------------


def test_duplicate_of_a_queued_message_is_not_sent(env: WorkerEnvironment, nowhere: str) -> None:
    """While the message waits, another call returns its result, with its holder, and publishes nothing."""
    sent = time.monotonic()
    first = env.job("publish").apply_async((env.tag,), queue=nowhere)
    assert first.duplicate is None
    assert lasts(queued(env, first), 3600, sent)
    second = env.job("publish").apply_async((env.tag,), queue=nowhere)
    assert (first.id, "queued") == (second.id, second.duplicate.state)
    assert 1 == messages(env, nowhere)


def test_duplicate_of_a_running_body_is_not_sent(env: WorkerEnvironment) -> None:
    """While the body runs, another call returns its result; afterwards the lock is free."""
    first = env.hold("publish")
    second = env.job("publish").delay(env.tag)
    assert (first.id, "running") == (second.id, second.duplicate.state)
    env.let_go()
    assert "held" == env.get(second)
    until(lambda: holder(env) is None, "the lock is free")
    assert "done" == env.get(env.job("publish").delay(env.tag))
    (start, _) = env.starts()
    assert (True, True) == (start["protected"], start["held"])


def test_duplicate_fails_in_the_caller(env: WorkerEnvironment, nowhere: str) -> None:
    """Under "raise", the caller of a duplicate gets `DuplicateTask` with the holder; nothing is published."""
    first = env.job("publish_raise").apply_async((env.tag,), queue=nowhere)
    with pytest.raises(DuplicateTask) as caught:
        env.job("publish_raise").apply_async((env.tag,), queue=nowhere)
    assert (first.id, "queued") == (caught.value.holder.task_id, caught.value.holder.state)
    assert 1 == messages(env, nowhere)


def test_duplicate_under_retry_is_sent(env: WorkerEnvironment) -> None:
    """Under "retry", a duplicate is sent without a reservation, and runs once the lock is free."""
    first = env.hold("publish_retry")
    second = env.job("publish_retry").delay(env.tag)
    assert (first.id, "running") == (second.duplicate.task_id, second.duplicate.state)
    assert first.id != second.id
    env.wait_for_state(second, "RETRY")
    env.let_go()
    assert "done" == env.get(second)


def test_callable_policy_sees_the_state(env: WorkerEnvironment, nowhere: str) -> None:
    """A callable policy is asked in the publisher, and can tell a message that waits from a body that runs."""
    first = env.job("publish_chosen").apply_async((env.tag,), queue=nowhere)
    assert first.id == env.job("publish_chosen").apply_async((env.tag,), queue=nowhere).id
    tag = env.other_tag("running")
    env.hold("publish_chosen", tag)
    with pytest.raises(DuplicateTask):
        env.job("publish_chosen").delay(tag)


def test_signal_of_a_duplicate(env: WorkerEnvironment, nowhere: str) -> None:
    """The signal `duplicate` is sent in the publisher, once for each call that is not published."""
    seen = []

    def note(**named: Any) -> None:
        seen.append((named["key"], named["holder"].task_id, type(named["policy"]).__name__))

    lock_signals.duplicate.connect(note)
    first = env.job("publish").apply_async((env.tag,), queue=nowhere)
    env.job("publish").apply_async((env.tag,), queue=nowhere)
    lock_signals.duplicate.disconnect(note)
    assert [(env.key("publish"), first.id, "Skip")] == seen


def test_body_that_publishes_itself(env: WorkerEnvironment) -> None:
    """A body that publishes its own call gets its own result."""
    result = env.job("publish").apply_async((env.tag, "publish_self"))
    assert f"published {result.id}" == env.get(result)
    assert 1 == len(env.starts())


def test_beat(env: WorkerEnvironment, nowhere: str) -> None:
    """Two beats with one schedule publish one message while it waits."""
    beats = [Scheduler(env.app, lazy=True) for _ in range(2)]
    entry = ScheduleEntry("e", "job.publish", schedule=60, args=(env.tag,), options={"queue": nowhere}, app=env.app)
    first, second = (beat.apply_async(entry, advance=False) for beat in beats)
    assert first.id == second.id
    assert 1 == messages(env, nowhere)


# -- how long a reservation lasts ------------------------------------------------------------------


def test_countdown_and_eta(env: WorkerEnvironment) -> None:
    """The time until a countdown or an ETA comes on top of `singleton_lock_queue_ttl`."""
    sent = time.monotonic()
    first = env.job("publish").apply_async((env.tag,), countdown=1000)
    assert lasts(queued(env, first), 4600, sent)
    tag, sent = env.other_tag("eta"), time.monotonic()
    eta = datetime.now(timezone.utc) + timedelta(seconds=500)
    env.job("publish").apply_async((tag,), eta=eta)
    assert lasts(env.job("publish").lock_holder(tag).remaining, 4100, sent)  # type: ignore[attr-defined]
    revoke(env, first)


@pytest.mark.parametrize("expires", [100, timedelta(seconds=100)])
def test_expiry_bounds_a_reservation(env: WorkerEnvironment, nowhere: str, expires: Any) -> None:
    """A reservation never lasts longer than its message: a later call is published."""
    sent = time.monotonic()
    at = datetime.now(timezone.utc) + expires if isinstance(expires, timedelta) else expires
    first = env.job("publish").apply_async((env.tag,), expires=at, queue=nowhere)
    assert lasts(queued(env, first), 100, sent)


def test_expired_message(env: WorkerEnvironment) -> None:
    """A message that has expired when the worker comes to it leaves no lock."""
    env.job("publish").apply_async((env.tag,), countdown=1, expires=0.5)
    until(lambda: holder(env) is None, "the reservation ends")
    assert "done" == env.get(env.job("publish").delay(env.tag))


def test_revoked_message(env: WorkerEnvironment) -> None:
    """A message that is revoked before its start frees its lock when the worker drops it."""

    def attempt(seconds: float) -> str | None:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        first = env.job("publish").apply_async((tag,), countdown=seconds)
        env.worker.wait_for_lines(first.id, "received")
        found = env.job("publish").lock_holder(tag)  # type: ignore[attr-defined]
        revoke(env, first)
        if time.monotonic() > sent + seconds:
            return None
        assert (first.id, "queued", 0) == (found.task_id, found.state, found.pid)
        env.wait_for_state(first, "REVOKED")
        return tag

    tag = in_time(attempt)
    until(lambda: env.job("publish").lock_holder(tag) is None, "the reservation ends")  # type: ignore[attr-defined]
    assert [] == env.starts(tag)


@pytest.fixture
def publisher(env: WorkerEnvironment) -> Iterator[Celery]:
    """Yield an app that locks at the publish what its worker locks at the start, as in a rolling deploy."""
    app = make_app({**dict(env.app.conf), "task_default_queue": env.worker.worker_queue})
    for name in ("skip", "wait_long"):
        app.tasks[f"job.{name}"].lock_from = "publish"
    yield app
    app.close()


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_message_of_another_publisher_never_starts(env: WorkerEnvironment, publisher: Celery, end: str) -> None:
    """A worker frees the reservation of a message that it drops, though its own `lock_from` is "start"."""
    job = publisher.tasks["job.skip"]

    def attempt(seconds: float) -> tuple[str, AsyncResult] | None:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        options = {"expires": seconds * 0.75} if end == "expired" else {}
        first = job.apply_async((tag,), countdown=seconds, **options)
        found = job.lock_holder(tag)  # type: ignore[attr-defined]
        if end == "revoked":
            revoke(env, first)
        if time.monotonic() > sent + options.get("expires", seconds):
            return None
        assert (first.id, "queued") == (found.task_id, found.state)
        return tag, first

    tag, first = in_time(attempt)
    until(lambda: job.lock_holder(tag) is None, "the reservation ends")  # type: ignore[attr-defined]
    assert "REVOKED" == env.wait_for_state(first, "REVOKED")
    assert [] == env.starts(tag)


def test_next_in_line_after_a_revoked_message(env: WorkerEnvironment, publisher: Celery) -> None:
    """What waits in line behind a reservation starts when its message is dropped, and not only when its own copy comes."""

    def attempt(seconds: float) -> tuple[str, float, AsyncResult, AsyncResult] | None:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        first = publisher.tasks["job.wait_long"].apply_async((tag,), countdown=seconds)
        joins = time.monotonic()
        second = env.job("wait_long").delay(tag)
        until(lambda: env.worker.lines(second.id, "waits in line") or env.starts(tag), "the second is decided")
        revoke(env, first)
        return (tag, joins, first, second) if time.monotonic() < sent + seconds else None

    tag, joins, first, second = in_time(attempt)
    assert "done" == env.get(second)
    (start,) = env.starts(tag)
    assert start["at"] < joins + LONGEST_COPY_DELAY
    assert "REVOKED" == env.wait_for_state(first, "REVOKED")


def test_purged_queue(env: WorkerEnvironment, nowhere: str) -> None:
    """The reservation of a purged message ends with `singleton_lock_queue_ttl`. Until then calls get its result, in vain."""

    def attempt(seconds: float) -> bool | None:
        conf = {**dict(env.app.conf), "task_default_queue": nowhere, "singleton_lock_queue_ttl": seconds}
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        with contextlib.closing(make_app(conf)) as app:
            job = app.tasks["job.publish"]
            first = job.delay(tag)
            until(lambda: app.control.purge() == 1, "purged")
            second = job.delay(tag)
            if time.monotonic() > sent + seconds:
                app.control.purge()
                return None
            assert (first.id, 0) == (second.id, messages(env, nowhere))
            until(lambda: job.lock_holder(tag) is None, "the reservation ends")
            assert time.monotonic() > sent + seconds
            later = job.apply_async((tag,), queue=env.worker.worker_queue)
            assert "done" == later.get(timeout=SOON)
            return "PENDING" == first.state

    assert in_time(attempt, 3.0)


def test_revoked_body_keeps_its_lock(env: WorkerEnvironment) -> None:
    """Revoking a task whose body runs does not free its lock."""
    first = env.hold("publish")
    revoke(env, first)
    env.worker.wait_for_lines(first.id, "revoked")
    second = env.job("publish").apply_async((env.tag,), countdown=0)
    assert (first.id, "running") == (second.id, second.duplicate.state)
    env.let_go()
    env.wait_for("end")  # and not a result: Celery 5.6 stores REVOKED also for a body that runs


def test_call_in_a_cooldown_whose_result_has_expired(env: WorkerEnvironment) -> None:
    """A call that meets a cooldown is sent, and ends as skipped, if the result of the run before it has expired."""
    first = env.job("publish_throttled").delay(env.tag)
    assert "done" == env.get(first)
    assert first.id == env.job("publish_throttled").delay(env.tag).id
    first.forget()
    second = env.job("publish_throttled").delay(env.tag)
    assert (first.id, "cooldown") == (second.duplicate.task_id, second.duplicate.state)
    assert second.id != first.id
    assert env.get(second) is None


def test_failed_publish(env: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish that fails frees the lock at once, and raises its own error."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(env.app, "send_task", fail)
        with pytest.raises(OperationalError, match="the broker is away"):
            env.job("publish").delay(env.tag)
    assert holder(env) is None


# -- messages that are always sent -----------------------------------------------------------------


def test_given_task_id_is_sent(env: WorkerEnvironment, nowhere: str) -> None:
    """A call with a task id is sent without a reservation."""
    result = env.job("publish").apply_async((env.tag,), task_id=f"mine-{env.tag}", queue=nowhere)
    assert f"mine-{env.tag}" == result.id
    assert holder(env) is None
    assert 1 == messages(env, nowhere)


def test_canvas_members_are_sent(env: WorkerEnvironment) -> None:
    """Members of chains, groups and chords are always sent, and meet the lock when they start."""
    job = env.job("publish")
    assert "done" == env.get(chain(job.si(env.tag), job.si(env.tag))())
    assert 2 == len(env.starts())
    assert sorted(map(str, env.get(group(job.si(env.tag) for _ in range(2))()))) in (
        ["None", "done"],
        ["done", "done"],
    )
    collect = env.app.tasks["collect"].s(env.other_tag("collected"))
    env.get(chord([job.si(env.tag), job.si(env.other_tag("b"))])(collect))
    until(lambda: holder(env) is None, "the lock is free")


def test_linked_callback_is_sent(env: WorkerEnvironment) -> None:
    """A linked callback whose lock is held fails by itself, and not the task that it follows."""
    env.hold("publish_raise")
    callback = env.job("publish_raise").si(env.tag)
    parent = env.job("plain").apply_async((env.other_tag("parent"),), link=callback)
    assert "done" == env.get(parent)
    (follower,) = until(lambda: parent.children, "the callback is sent")
    assert isinstance(env.error(follower), DuplicateTask)
    assert "SUCCESS" == parent.state


def test_foreign_publisher(env: WorkerEnvironment) -> None:
    """A message from `send_task`, which knows no locks, acquires the lock when it starts."""
    assert "done" == env.get(env.app.send_task("job.publish", (env.tag,)))
    assert env.starts()[0]["protected"] is True
    until(lambda: holder(env) is None, "the lock is free")


def test_foreign_message_meets_a_reservation(env: WorkerEnvironment, nowhere: str) -> None:
    """A message without a reservation that starts while another message has one is a duplicate of it."""
    first = env.job("publish").apply_async((env.tag,), queue=nowhere)
    assert env.get(env.app.send_task("job.publish", (env.tag,))) is None
    assert [] == env.starts()
    queued(env, first)


# -- start and end ---------------------------------------------------------------------------------


def test_redelivered_message_starts(env: WorkerEnvironment, nowhere: str) -> None:
    """A message whose worker died before its start runs when it is delivered again."""
    with env.captured_messages() as sent:
        first = env.job("publish").apply_async((env.tag,), queue=nowhere)
    env.redeliver({**sent[0], "routing_key": env.worker.worker_queue})
    assert "done" == env.get(first)
    until(lambda: holder(env) is None, "the lock is free")


@pytest.mark.parametrize("locked", ["publisher", "worker"])
def test_rolling_deploy(env: WorkerEnvironment, locked: str) -> None:
    """Publishers and workers that differ in `lock_from` exclude each other, and leave no lock."""
    name = "skip" if locked == "publisher" else "publish"
    app = make_app({**dict(env.app.conf), "task_default_queue": env.worker.worker_queue})
    task = app.tasks[f"job.{name}"]
    task.lock_from = "publish" if locked == "publisher" else "start"
    first = task.apply_async((env.tag, "hold"))
    env.wait_for("start")
    second = task.apply_async((env.tag,))
    if locked == "publisher":
        assert first.id == second.id
    else:
        assert second.get(timeout=SOON) is None
    env.let_go()
    assert "held" == first.get(timeout=SOON)
    until(lambda: holder(env, name) is None, "the lock is free")
    app.close()


def test_own_retry_keeps_the_lock(env: WorkerEnvironment) -> None:
    """While a task waits for its own retry, its message has the lock: other calls return its result."""

    def attempt(seconds: float) -> str | None:
        tag, job, sent = env.other_tag(f"{seconds:g}"), env.job("publish"), time.monotonic()
        first = job.apply_async((tag,), {"acts": ["retry", "return"], "seconds": seconds})
        until(lambda: env.events("end", tag), "the first run ends")
        env.wait_for_state(first, "RETRY", "SUCCESS")
        second = job.delay(tag)
        if time.monotonic() > sent + seconds:
            return None
        assert (first.id, "queued") == (second.id, second.duplicate and second.duplicate.state), "the retry waits"
        assert "done" == env.get(second)
        assert [first.id, first.id] == [start["id"] for start in env.starts(tag)]
        return tag

    tag = in_time(attempt)
    until(lambda: env.job("publish").lock_holder(tag) is None, "the lock is free")  # type: ignore[attr-defined]


def test_retry_with_other_arguments_frees_the_lock(env: WorkerEnvironment) -> None:
    """A retry with another lock key leaves no reservation of the first."""
    first = env.job("publish").apply_async((env.tag,), {"acts": "retry_other", "seconds": 0.0})
    env.other_tag("other")
    assert "done" == env.get(first)
    until(lambda: holder(env) is None, "the lock is free")


def test_lock_until_start(env: WorkerEnvironment, nowhere: str) -> None:
    """With ``lock_until="start"``, only a waiting message has the lock: its body runs without, beside others."""
    job = env.job("publish_until_start")
    first = job.apply_async((env.tag,), queue=nowhere)
    assert first.id == job.apply_async((env.tag,), queue=nowhere).id
    tag = env.other_tag("runs")
    running = env.hold("publish_until_start", tag, ("hold", "return"))
    assert job.lock_holder(tag) is None  # type: ignore[attr-defined]
    assert env.starts(tag)[0]["protected"] is False
    assert "done" == env.get(job.delay(tag))
    env.let_go(tag)
    assert "held" == env.get(running)


def test_killed_body(env: WorkerEnvironment, pool: str) -> None:
    """A reserved message whose child is killed and that the broker delivers again runs, and frees the lock."""
    if pool != "prefork":
        pytest.skip("a thread cannot be killed")
    result = env.job("publish_comes_back").apply_async((env.tag,), {"acts": ["hold", "return"]})
    start = env.wait_for("start")
    env.kill_body(start)
    assert "done" == env.get(result)
    until(lambda: holder(env, "publish_comes_back") is None, "the lock is free")


# -- the store is away -----------------------------------------------------------------------------


@pytest.fixture
def app_without_store(env: WorkerEnvironment, nowhere: str) -> Iterator[Celery]:
    """Yield an app that publishes to nobody, and whose store is unreachable."""
    conf = {**dict(env.app.conf), "task_default_queue": nowhere, "singleton_lock_url": "redis://127.0.0.1:9/0"}
    app = make_app(conf)
    yield app
    app.close()


@pytest.mark.parametrize("name", ["publish", "publish_run"])
def test_unreachable_store(
    env: WorkerEnvironment, app_without_store: Celery, nowhere: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With an unreachable store, the message is sent without a reservation; a WARNING tells of the outage, once."""
    caplog.set_level("DEBUG", "celery_singleton_lock")
    result = app_without_store.tasks[f"job.{name}"].delay(env.tag)
    assert result.duplicate is None
    assert 1 == messages(env, nowhere)
    assert f"job.{name}[{result.id}] could not acquire its lock, and is sent without it: " in caplog.text
    app_without_store.tasks[f"job.{name}"].delay(env.tag)
    assert 1 == len([one for one in caplog.records if one.levelname == "WARNING"])


def test_reservation_that_was_not_answered(env: WorkerEnvironment, nowhere: str) -> None:
    """The reservation of a call that fails, as too few replicas have it, is released: the next call is no duplicate of it."""
    options = {"singleton_lock_replicas": 1, "singleton_lock_store_timeout": 1.0}
    app = make_app({**dict(env.app.conf), "task_default_queue": nowhere, **options})
    with pytest.raises(StoreUnavailable):
        app.tasks["job.publish_strict"].delay(env.tag)
    until(lambda: not env.is_locked("publish_strict"), "the lock is free")
    assert 0 == messages(env, nowhere)
    app.close()


def test_next_call_after_a_lost_answer(env: WorkerEnvironment, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call right after one whose reservation was not answered, nor released yet, is published: it meets no message."""
    acquire, release = RedisStore.acquire, RedisStore.release
    lost = [True]

    def unanswered(self: RedisStore, *args: Any, **named: Any) -> Any:
        found = acquire(self, *args, **named)
        if lost:
            raise StoreUnavailable("the answer is lost")
        return found

    def unreleased(self: RedisStore, *args: Any, **named: Any) -> Any:
        if lost:
            raise StoreUnavailable("it is not released yet")
        return release(self, *args, **named)

    monkeypatch.setattr(RedisStore, "acquire", unanswered)
    monkeypatch.setattr(RedisStore, "release", unreleased)
    with pytest.raises(StoreUnavailable):
        env.job("publish_strict").apply_async((env.tag,), queue=nowhere)
    assert env.is_locked("publish_strict")
    lost.clear()
    result = env.job("publish_strict").apply_async((env.tag,), queue=nowhere)
    assert result.duplicate is None
    assert 1 == messages(env, nowhere)


def test_failed_publication_in_an_outage(env: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reservation of a message that could not be sent is released when the store can be reached again."""
    release, away = RedisStore.release, [True]

    def unreleased(self: RedisStore, *args: Any, **named: Any) -> Any:
        if away:
            raise StoreUnavailable("away")
        return release(self, *args, **named)

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise OperationalError("away, too")

    monkeypatch.setattr(RedisStore, "release", unreleased)
    with monkeypatch.context() as patch:
        patch.setattr(env.app, "send_task", fail)
        with pytest.raises(OperationalError):
            env.job("publish").delay(env.tag)
    assert env.is_locked("publish")
    away.clear()
    until(lambda: not env.is_locked("publish"), "the lock is free")


def test_interrupted_reservation(env: WorkerEnvironment, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is that of a caller who is interrupted when the store has granted it, as by a time limit."""
    acquire = RedisStore.acquire

    def interrupted(self: RedisStore, spec: LeaseSpec) -> NoReturn:
        acquire(self, spec)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(RedisStore, "acquire", interrupted)
    with pytest.raises(SoftTimeLimitExceeded):
        env.job("publish").apply_async((env.tag,), queue=nowhere)
    until(lambda: not env.is_locked("publish"), "the lock is free")
    assert 0 == messages(env, nowhere)


def test_unreachable_store_raises(
    env: WorkerEnvironment, app_without_store: Celery, nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``on_store_error="raise"``, the caller gets the error, and nothing is sent."""
    caplog.set_level("DEBUG", "celery_singleton_lock")
    with pytest.raises(StoreUnavailable):
        app_without_store.tasks["job.publish_strict"].delay(env.tag)
    assert 0 == messages(env, nowhere)
    assert "could not acquire its lock: " in caplog.text
