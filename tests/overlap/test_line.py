"""Messages that wait in line: under "wait" all of them run in order, under "run_once_more" one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask, Policy, Replace, Wait
from celery_singleton_lock.line.joining import LONGEST_COPY_DELAY
from celery_singleton_lock.store.keys import LINE_TOKEN
from tests.in_time import in_time
from tests.integration.environment import SOON, WorkerEnvironment
from tests.integration.monitor import Monitor
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.servers import until

#: Seconds: less than the minute after which the delayed copy of a message comes, so that no copy starts what is seen by then.
BEFORE_A_COPY = LONGEST_COPY_DELAY - 15
#: Options of a holder that keeps its lease for as long as a test may take.
HOLDS = {"lock_options": {"lock_ttl": 600}}
#: Where the message whose turn it is does not come: its turn, too, lasts for the holder's TTL.
HOLDS_BRIEFLY = {"lock_options": {"lock_ttl": 12}}


def in_line(env: WorkerEnvironment, name: str, tag: str | None = None) -> int:
    """Return how many messages wait for the lock of a job."""
    return len(env.tickets(name, tag))


def enqueue(env: WorkerEnvironment, name: str, count: int, **options: Any) -> list[AsyncResult]:
    """Send duplicates of a job whose lock is held, each once the one before waits in line."""
    results = []
    for number in range(count):
        before = in_line(env, name)
        results.append(env.job(name).apply_async((env.tag,), options.pop("kwargs", None), **options))
        until(lambda: in_line(env, name) > before, f"number {number} waits")  # noqa: B023
    return results


def order(env: WorkerEnvironment) -> list[str]:
    """Return the task ids of the bodies that started, in order."""
    return [start["id"] for start in env.starts()]


def assert_one_at_a_time(env: WorkerEnvironment) -> None:
    """Check that each body ended before the next one started."""
    bodies = [event["what"] for event in env.events() if event["what"] in ("start", "end")]
    assert ["start", "end"] * (len(bodies) // 2) == bodies


# -- wait ------------------------------------------------------------------------------------------


def test_all_run_in_order(env: WorkerEnvironment) -> None:
    """Duplicates run one after the other in the order of their arrival, at once after each end."""
    first, sent = env.hold("wait_long"), time.monotonic()
    waiting = enqueue(env, "wait_long", 5)
    assert [first.id] == order(env)
    env.let_go()
    assert ["held", *["done"] * 5] == [env.get(result) for result in (first, *waiting)]
    assert env.starts()[-1]["at"] < sent + LONGEST_COPY_DELAY
    assert [first.id, *(result.id for result in waiting)] == order(env)
    assert_one_at_a_time(env)
    until(lambda: not env.is_locked("wait_long"), "the lock is free")
    assert 0 == in_line(env, "wait_long")


@pytest.mark.timeout(300)
def test_busy_queue(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
    """Messages that wait run also if each of them spends more than a `lock_ttl`, its turn, in the queue."""
    queue = fresh_worker(WorkerSpec("solo", 1)).worker_queue
    first = env.hold("wait_brief", **HOLDS)
    waiting = enqueue(env, "wait_brief", 40, queue=queue)
    with kept_busy(env, queue, 2.5):
        env.let_go()
        until(lambda: len(order(env)) > 3, "some of them have run", 100)
    assert ["held", *["done"] * 40] == [env.get(result) for result in (first, *waiting)]
    assert_one_at_a_time(env)


@contextmanager
def kept_busy(env: WorkerEnvironment, queue: str, seconds: float) -> Iterator[None]:
    """Keep so many seconds of other work in a queue whose worker has one place."""
    ended, tag, each, sent = threading.Event(), env.other_tag("busy"), 0.1, itertools.count()

    def send() -> None:
        for number in sent:
            if ended.is_set():
                return
            until(lambda: number - len(env.recorder.events(tag, "start")) < seconds / each, "some have run")  # noqa: B023
            env.job("plain").apply_async((tag, "sleep", each), queue=queue)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            yield
        finally:
            ended.set()
            sending.result()


def test_state_of_a_waiting_message(env: WorkerEnvironment) -> None:
    """A message that waits stores no state of its own, and occupies no worker process."""
    first = env.hold("wait_long")
    waiting = enqueue(env, "wait_long", 6)
    states = {result.state for result in waiting}
    assert states <= {"PENDING", "STARTED"}, states
    assert "done" == env.get(env.job("skip").delay(env.other_tag("other")))
    env.let_go()
    env.get(first)
    env.get(waiting[-1])


def test_copies_are_dropped(env: WorkerEnvironment) -> None:
    """After a message was published in its turn, its delayed copy does not run it again, also after a failure."""
    with Monitor(env.app.conf.broker_url) as monitor:
        env.hold("wait", **HOLDS)
        (waiting,) = enqueue(env, "wait", 1, kwargs={"acts": ["hold", "raise", "return"]})
        env.let_go()
        assert "Boom" == type(env.error(waiting)).__name__

        def has_come() -> bool:
            copies = monitor.where("EVALSHA", env.key("wait"), LINE_TOKEN)
            others = [at for at in monitor.where("EVALSHA", env.key("wait")) if at not in copies]
            return (
                bool(copies) and copies[-1] > others[4]
            )  # the holder's start, two of joining, a release, and the start

        until(has_come, "its copy comes after its start")
    env.finish(waiting.id)
    assert 2 == len(env.starts())
    assert "FAILURE" == env.app.AsyncResult(waiting.id).state


def test_full_line(env: WorkerEnvironment) -> None:
    """A message that finds `max_waiting` others in line fails as under "raise"."""
    env.hold("wait_little")
    waiting = enqueue(env, "wait_little", 2)
    assert isinstance(env.error(env.job("wait_little").delay(env.tag)), DuplicateTask)
    env.let_go()
    assert ["done", "done"] == [env.get(result) for result in waiting]


def test_longest_wait(env: WorkerEnvironment) -> None:
    """A message that has waited for `max_wait` fails as under "raise", and leaves the line."""
    first = env.hold("wait_short", **HOLDS)
    late = env.job("wait_short").delay(env.tag)
    assert isinstance(env.error(late), DuplicateTask)
    assert 0 == in_line(env, "wait_short")
    env.let_go()
    env.get(first)
    env.finish(late.id)
    assert [first.id] == order(env)


@pytest.mark.parametrize("policy", [Wait(max_wait=2.0), Replace(grace=60, max_wait=2.0)], ids=repr)
def test_longest_wait_of_a_long_lease(env: WorkerEnvironment, policy: Policy) -> None:
    """The message fails after `max_wait`, however long the `lock_ttl` is."""
    first = env.hold("wait_long")
    late = env.job("wait_long").apply_async((env.tag,), lock_options={"on_duplicate": policy})
    assert isinstance(env.error(late, BEFORE_A_COPY), DuplicateTask)
    env.let_go()
    env.get(first)
    assert [first.id] == order(env)


def test_expiry(env: WorkerEnvironment) -> None:
    """A message that expires while it waits ends as REVOKED, as in a queue, and does not keep others waiting."""
    env.hold("wait_short_ttl", **HOLDS)
    expired = in_time(partial(joined, env, "wait_short_ttl"))
    last = env.job("wait_short_ttl").delay(env.tag)
    env.worker.wait_for_lines(f"[{last.id}]", "waits in line")
    env.wait_for_state(expired, "REVOKED")
    env.let_go()
    assert "done" == env.get(last)
    assert expired.id not in order(env)


def joined(env: WorkerEnvironment, name: str, seconds: float) -> AsyncResult | None:
    """Send a duplicate that expires after so many seconds; return it once it waits in line, None if it has expired before."""
    before = in_line(env, name)
    result = env.job(name).apply_async((env.tag,), expires=seconds)
    until(lambda: in_line(env, name) > before or result.state == "REVOKED", "it is decided")
    return result if in_line(env, name) > before else None


def test_revoked_messages(env: WorkerEnvironment) -> None:
    """Messages that are revoked while they wait end as REVOKED when it is their turn, and the next one starts at once."""
    first, sent = env.hold("wait_long"), time.monotonic()
    *revoked, last = enqueue(env, "wait_long", 4)
    for result in revoked:
        env.app.control.revoke(result.id, destination=[env.worker.hostname()], reply=True, timeout=SOON)
    env.let_go()
    assert "done" == env.get(last)
    assert env.starts()[-1]["at"] < sent + LONGEST_COPY_DELAY  # for a minute the lock is reserved, too
    assert ["REVOKED"] * 3 == [env.wait_for_state(result, "REVOKED") for result in revoked]
    assert [first.id, last.id] == order(env)


def test_revocation_by_stamp(env: WorkerEnvironment) -> None:
    """A waiting message that is revoked by a stamp ends as REVOKED; its copies are not revoked instead of it."""
    first = env.hold("wait_short_ttl", **HOLDS)
    stamp = env.tag
    options = {"stamped_headers": ["of"], "of": stamp, "headers": {"stamped_headers": ["of"], "stamps": {"of": stamp}}}
    (revoked,) = enqueue(env, "wait_short_ttl", 1, **options)
    destination = [env.worker.hostname()]
    env.app.control.revoke_by_stamped_headers({"of": [stamp]}, destination, reply=True, timeout=SOON)
    before = time.monotonic()
    until(lambda: time.monotonic() > before + 4.0, "its place is lost, if no copy keeps it")
    env.let_go()
    env.get(first)
    env.wait_for_state(revoked, "REVOKED")
    assert [first.id] == order(env)


def test_copy_that_cannot_be_published(env: WorkerEnvironment) -> None:
    """If the broker takes no messages when a duplicate is about to wait, the duplicate fails with that error."""
    env.hold("wait_long")
    env.allow_publishing(False)
    try:
        assert "OperationalError" == type(env.error(env.job("wait_long").delay(env.tag))).__name__
    finally:
        env.allow_publishing(True)
    assert 0 == in_line(env, "wait_long")


def test_canvas(env: WorkerEnvironment) -> None:
    """Chains, groups and chords go on with the results of members that waited."""
    job, other = env.job("wait_long"), env.other_tag("collected")
    env.hold("wait_long")
    last = chain(job.si(env.tag), env.app.tasks["then"].si(env.other_tag("then")))()
    members = group(job.si(env.tag) for _ in range(2))()
    whole = chord([job.si(env.tag), job.si(env.tag)])(env.app.tasks["collect"].s(other))
    until(lambda: in_line(env, "wait_long") == 5, "all wait")
    env.let_go()
    env.get(last)
    assert ["done", "done"] == env.get(members)
    env.get(whole)
    assert [["done", "done"]] == [event["results"] for event in env.events("collect", other)]
    assert_one_at_a_time(env)


def test_message_is_kept(env: WorkerEnvironment) -> None:
    """A message from the line has the caller's headers, priority, time limits and links, and nothing of the line."""
    env.hold("wait_long")
    callback = env.app.tasks["then"].si(env.other_tag("link"))
    (waiting,) = enqueue(
        env, "wait_long", 1, headers={"x-mine": "1"}, priority=3, time_limit=50, link=callback, argsrepr="(...)"
    )
    env.let_go()
    assert "done" == env.get(waiting)
    env.wait_for("then", env.other_tag("link"))


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_long_messages(env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode], serializer: str) -> None:
    """Messages of hundreds of kilobytes start as soon as the one before them has ended, in any serializer."""
    worker = fresh_worker(WorkerSpec("prefork", 2, conf={"accept_content": ["json", "pickle"]}))
    job, queue = env.job("wait_long"), worker.worker_queue
    first = env.hold("wait_long", queue=queue)
    waiting = []
    for _ in range(3):
        waiting.append(job.apply_async((env.tag,), headers={"long": "x" * 300_000}, serializer=serializer, queue=queue))
        until(lambda: in_line(env, "wait_long") == len(waiting), "it waits")
    env.let_go()
    assert ["held", "done", "done", "done"] == [env.get(result) for result in (first, *waiting)]


def test_own_retry_does_not_keep_a_ticket(env: WorkerEnvironment) -> None:
    """A message that waited and then retries itself runs again as its own retry says."""
    env.hold("wait_long")
    (waiting,) = enqueue(env, "wait_long", 1, kwargs={"acts": ["hold", "retry", "return"], "seconds": 0.0})
    env.let_go()
    assert "done" == env.get(waiting)
    assert [waiting.id, waiting.id] == order(env)[1:]


def test_killed_holder(env: WorkerEnvironment) -> None:
    """After the holder's child was killed, its worker releases the lock and starts the first in line at once."""
    env.hold("wait_long")
    waiting = enqueue(env, "wait_long", 3)
    env.kill_body(env.starts()[0])
    assert ["done"] * 3 == [env.get(result, BEFORE_A_COPY) for result in waiting]
    assert [result.id for result in waiting] == order(env)[1:]
    assert_no_overlap(env)


def assert_no_overlap(env: WorkerEnvironment) -> None:
    """Check that no two bodies ran at once, but for one that was killed and has no end."""
    for before, after in itertools.pairwise(
        event["what"] for event in env.events() if event["what"] in ("start", "end")
    ):
        assert (before, after) != ("end", "end")


def test_store_that_lost_its_data(env: WorkerEnvironment) -> None:
    """After the store lost the line, all messages run, one at a time."""
    # The holder has its lock again in a third of this time; the copies of those that wait come after all of it.
    first = env.hold("wait", **HOLDS_BRIEFLY)
    waiting = enqueue(env, "wait", 3, **HOLDS_BRIEFLY)
    client: Any = env.store()
    client.delete(*client.keys(f"{env.key('wait').partition(':lock:')[0]}*"))
    client.close()
    until(lambda: env.is_locked("wait"), "reacquired")
    env.let_go()
    assert ["held", *["done"] * 3] == [env.get(result) for result in (first, *waiting)]
    assert 4 == len(env.starts())
    assert_one_at_a_time(env)


def test_broker_that_takes_no_messages(env: WorkerEnvironment) -> None:
    """If the next message cannot be published, as `acks_late` needs, the message's copy starts it later."""
    first = env.hold("wait_late", **HOLDS_BRIEFLY)
    (waiting,) = enqueue(env, "wait_late", 1)
    env.allow_publishing(False)
    env.let_go()
    env.get(first)
    try:
        env.worker.wait_for_lines(f"Task job.wait_late[{waiting.id}] could not be published in its turn")
    finally:
        env.allow_publishing(True)
    assert "done" == env.get(waiting)


def test_late_acknowledgement(env: WorkerEnvironment) -> None:
    """A message from the line whose child is killed is delivered again and runs, although its copies are dropped."""
    first = env.hold("wait_late", **HOLDS)
    (waiting,) = enqueue(env, "wait_late", 1, kwargs={"acts": ["hold", "die", "return"]})
    env.let_go()
    assert ["held", "done"] == [env.get(first), env.get(waiting)]
    assert [waiting.id, waiting.id] == order(env)[1:]


# -- run once more ---------------------------------------------------------------------------------


def test_one_runs_once_more(env: WorkerEnvironment) -> None:
    """Of many duplicates the first runs after the holder; the others end at once, skipped."""
    first = env.hold("once_more")
    (pending,) = enqueue(env, "once_more", 1)
    others = [env.job("once_more").delay(env.tag) for _ in range(10)]
    assert [None] * 10 == [env.get(result) for result in others]
    env.let_go()
    assert ["held", "done"] == [env.get(first), env.get(pending)]
    assert [first.id, pending.id] == order(env)
    third = env.job("once_more").delay(env.tag)
    assert "done" == env.get(third)


def test_the_latest_runs_once_more(env: WorkerEnvironment) -> None:
    """With ``keep="latest"`` the newest duplicate runs after the holder, and the ones before it end as skipped."""
    first = env.hold("once_more_latest")
    (replaced,) = enqueue(env, "once_more_latest", 1)
    latest = env.job("once_more_latest").delay(env.tag)
    key = env.key("once_more_latest").replace(":lock:", ":waiting:")
    client: Any = env.store()
    until(lambda: latest.id in client.hvals(key) or latest.id.encode() in client.hvals(key), "the latest waits")
    client.close()
    env.let_go()
    assert ["held", "done"] == [env.get(first), env.get(latest)]
    assert [first.id, latest.id] == order(env)
    assert replaced.id not in order(env)


def test_storm(env: WorkerEnvironment) -> None:
    """Of a storm of calls with no pause, few run, one of them after the last call, and all end."""
    job, seconds = env.job("once_more"), 0.3
    results = [job.apply_async((env.tag, "sleep"), {"seconds": seconds}) for _ in range(200)]
    values = [env.get(result) for result in results]
    assert set(values) == {"slept", None}
    starts, decided = env.starts(), env.lock_signals(env.key("once_more"), "duplicate")[-1]["at"]
    assert values.count("slept") == len(starts) <= 3 + (decided - starts[0]["at"]) / seconds
    assert_one_at_a_time(env)


def test_pending_run_that_expires(env: WorkerEnvironment) -> None:
    """A pending run that expires leaves the line at that moment, so that a later call runs after the holder."""
    first = env.hold("once_more")
    expired = in_time(partial(joined, env, "once_more"))
    env.wait_for_state(expired, "REVOKED")
    until(lambda: in_line(env, "once_more") == 0, "it has left the line")
    (last,) = enqueue(env, "once_more", 1)
    env.let_go()
    assert ["held", "done"] == [env.get(first), env.get(last)]
    assert [first.id, last.id] == order(env)
