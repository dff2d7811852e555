"""Faults 37 to 39 and 43: fifty messages in one line, and the end of the store, of the holder's worker, or of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from celery.result import AsyncResult

from tests.faults.harness import Worker, WorkerEnvironment, now
from tests.servers import RabbitMQServer, until

#: Short, so that the copies of messages in line come soon.
TTL = 4.0
MANY = 50
#: Seconds that each of their bodies takes.
BRIEF = 0.03
#: Bound in seconds from the end of the holder's lease until all have run: a copy starts the first, and each publishes the next.
ALL = TTL + 1.5 + MANY * 0.3
#: Queue of the holder's worker, where that worker has no copies.
OWN = "own"


@contextlib.contextmanager
def _fifty(
    name: str, expect: str, queue: str = "", broker: str | RabbitMQServer = "redis"
) -> Iterator[tuple[WorkerEnvironment, Worker, list[AsyncResult]]]:
    """Yield an environment where fifty messages wait for a body, with its worker and them; check that all of them run.

    Args:
        name: of their task.
        expect: of them.
        queue: of the holder's worker; empty if it shares the queue of the messages, and so has some of their copies.
    """
    with WorkerEnvironment(ttl=TTL, broker=broker) as env:
        own = {"queue": queue} if queue else {}
        victim = env.worker(options=("-Q", queue) if queue else ())
        env.send(name, "a", ["hold"], **own)
        env.body("a")
        env.worker("threads", 4)
        waiting = env.line_up(name, "a", MANY, ["sleep", BRIEF], expect=expect)
        assert MANY == env.in_line(name, "a")
        yield env, victim, waiting
        assert ["slept"] * MANY == [result.get(timeout=60) for result in waiting]
        until(lambda: env.in_line(name, "a") == 0, "the line is empty")  # the holder's message may have joined it
        env.finish()


def _all_run(env: WorkerEnvironment, what: str, bound: float, since: float, waiting: list[AsyncResult]) -> None:
    """Wait until all have run, and record how long that took."""
    for result in waiting:
        result.get(timeout=60)
    env.measured(f"{what}, {MANY} in line: all have run", bound, now() - since)


def _ran(env: WorkerEnvironment, waiting: list[AsyncResult]) -> list[str]:
    """Return the task ids of the messages that waited, in the order of their starts."""
    ids = {result.id for result in waiting}
    return [event["task_id"] for event in env.ledger.events("start") if event["task_id"] in ids]


def test_fifty_and_a_killed_holder() -> None:
    """All messages in line run in the order in which they joined it, once the lease of the killed holder has expired."""
    with _fifty("wait", "once", OWN) as (env, victim, waiting):
        fault = env.kill(victim)
        _all_run(env, "37 holder's worker killed", TTL + ALL, fault.at, waiting)
        assert [result.id for result in waiting] == [event["task_id"] for event in env.ledger.events("start")][1:]
        env.last(TTL + 1)  # the last copies have come
        assert MANY + 1 == len(env.ledger.events("start"))


def test_fifty_and_killed_copies(rabbitmq_server: RabbitMQServer) -> None:
    """All messages run if the holder's worker dies with copies that it had; the broker delivers these to another worker."""
    with _fifty("late-wait", "once in peace", broker=rabbitmq_server) as (env, victim, waiting):
        fault = env.kill(victim)
        env.ledger.raise_flag("a.go")  # the holder's message comes again, too
        _all_run(env, "38 worker of holder and copies killed", TTL + ALL, fault.at, waiting)


def test_fifty_and_lost_data() -> None:
    """All messages run, one at a time, after the store has lost the line: each joins it again when its copy comes."""
    with _fifty("wait", "run", OWN) as (env, _, waiting):
        with env.schedule.during("empty") as fault:
            env.store.stop()
            env.store.start()
        env.last(TTL / 2)
        env.go("a")
        _all_run(env, "39 store emptied", TTL + ALL, fault.at, waiting)
        assert MANY + 1 == len(env.ledger.events("start"))


def test_fifty_and_both_ends() -> None:
    """All messages run once, in the order in which they came back, after the store lost the line and the holder's worker died."""
    with _fifty("wait", "once", OWN) as (env, victim, waiting):
        ran = partial(_ran, env, waiting)
        with env.schedule.during("empty") as fault:
            env.store.stop()
            env.kill(victim)
            env.store.start()
        newcomer = env.send(
            "wait", "a", ["hold"], expect="once"
        )  # so that the copies find the lock held, and join again
        env.wait("start", task_id=newcomer.id)
        # A copy that came before it has found a free lock, so its message has run.
        until(lambda: env.in_line("wait", "a") + len(ran()) == MANY, "all are in line again", TTL + ALL)
        env.go("a")
        _all_run(env, "43 store emptied and holder's worker killed", TTL + ALL, fault.at, waiting)
        back = [event["task_id"] for event in env.ledger.events("line", does="join") if event["at"] > fault.until]
        back = [task_id for task_id in dict.fromkeys(back) if task_id != newcomer.id]
        assert MANY / 2 < len(back)
        assert back == [task_id for task_id in ran() if task_id in back]
        env.last(TTL + 1)  # the last copies have come
        assert {result.id for result in waiting} == set(ran())
        assert MANY == len(ran())
