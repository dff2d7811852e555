"""Faults 40 and 41: between the publish of a message that has its lock and its start."""

from __future__ import annotations

from celery.result import AsyncResult

from tests.faults.harness import WorkerEnvironment, now
from tests.faults.matrix import LATE
from tests.servers import RabbitMQServer, until

TTL = 4.0
#: Seconds for which a message that has not started keeps its lock.
QUEUED = 6.0
#: A worker looks at a message in its hands every second.
SOON = 2.0


def _reserved(env: WorkerEnvironment, tag: str) -> str:
    """Return the task id for which a lock is reserved; empty if it is not."""
    holder = env.app.tasks["publish"].lock_holder(tag)
    return holder.task_id if holder is not None and holder.state == "queued" else ""


def test_store_faults_before_the_start() -> None:
    """A reservation outlasts a pause; a call while the store is away is sent without one; both messages run once."""
    with WorkerEnvironment(ttl=TTL) as env:
        before = env.send("publish", "a", expect="once")
        assert before.id == _reserved(env, "a")
        with env.schedule.during("pause"):
            env.store.pause()
            during = env.send("publish", "b", expect="once")
            env.store.resume()
        assert before.id == _reserved(env, "a") == env.send("publish", "a").id
        assert _reserved(env, "b") in ("", during.id)  # the store may have executed the call that got no answer
        env.worker()
        assert ["slept", "slept"] == [before.get(timeout=LATE), during.get(timeout=LATE)]
        env.finish()


def test_data_lost_before_the_start() -> None:
    """After a loss of data a second call is sent; it has the lock, and the first message is its duplicate."""
    with WorkerEnvironment(ttl=TTL) as env:
        first = env.send("publish", "a", expect="decided in peace")
        alone = env.send("publish", "b", expect="once")
        with env.schedule.during("empty"):
            env.store.stop()
            env.store.start()
        second = env.send("publish", "a", expect="once")
        assert second.id != first.id
        env.worker("threads", 1)
        assert [None, "slept", "slept"] == [result.get(timeout=LATE) for result in (first, second, alone)]
        env.finish()


def test_receiver_killed(rabbitmq_server: RabbitMQServer) -> None:
    """A message in the hands of a killed worker keeps its lock, and starts at another worker without waiting for any TTL."""
    with WorkerEnvironment(ttl=40, broker=rabbitmq_server) as env:
        victim = env.worker(concurrency=1)
        env.send("skip", "busy", ["hold"])
        env.body("busy")
        waiting: AsyncResult = env.send("publish", "a", expect="once")
        env.wait("received", task_id=waiting.id)
        fault = env.kill(victim)
        assert waiting.id == _reserved(env, "a") == env.send("publish", "a").id
        env.worker("threads")
        assert "slept" == waiting.get(timeout=LATE)
        assert env.body("a")["at"] > fault.at
        with env.client() as client:
            client.delete(env.app.tasks["skip"].lock_key_for("busy"))  # its TTL is long
        env.finish()


def test_message_that_never_starts() -> None:
    """A revoked message frees its lock while it waits for its time to start; the lock of a lost or expired message expires."""
    with WorkerEnvironment(ttl=TTL, singleton_lock_queue_ttl=QUEUED) as env:
        worker, sent, begin = env.worker("threads", 1), {}, {}
        for tag, options in {
            "lost": {"queue": "nowhere"},
            "revoked": {"countdown": 60},
            "expired": {"countdown": 4, "expires": 2},
        }.items():
            begin[tag] = now()
            sent[tag] = env.send("publish", tag, expect="none", **options)
            assert sent[tag].id == env.send("publish", tag).id == _reserved(env, tag)
        for tag, bound in {"expired": 2.0, "lost": QUEUED}.items():
            until(lambda tag=tag: not _reserved(env, tag), f"{tag} is free")  # type: ignore[misc]
            env.measured(f"41 message {tag}: its lock is free", bound + SOON, now() - begin[tag], at_least=bound - 0.5)
        assert sent["revoked"].id == _reserved(env, "revoked")
        revoked = now()
        env.app.control.revoke(sent["revoked"].id, destination=[worker.node], reply=True, timeout=LATE)
        until(lambda: not _reserved(env, "revoked"), "revoked is free")
        env.measured("41 message revoked: its lock is free", SOON, now() - revoked)
        env.finish()
