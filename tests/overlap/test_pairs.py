"""Pairs of options that do not exclude each other: each has its documented outcome in one real worker (reference/options.md)."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery
from pytest_celery import CeleryWorkerCluster

from celery_singleton_lock import DuplicateTask, LockLost, StoreUnavailable, TooManyStarts
from celery_singleton_lock.line.joining import LONGEST_COPY_DELAY
from tests.in_time import in_time
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Event, Recorder
from tests.integration.tasks import Boom, lock_tag, perform
from tests.pairs import ALLOWED, CAP, COOLDOWN, LIVE, TRIES, Pair, add_pairs, case_of, task_name
from tests.servers import RedisServer, until

#: Value of `on_duplicate` -> what becomes of a call that meets a running body.
OUTCOMES = {
    "skip": "skipped",
    "raise": "failed",
    "callable": "failed",
    "retry": "runs after",
    "wait": "runs after",
    "run_once_more": "runs after",
    "latest": "runs after",
    "quiet": "runs after",
    "join": "has the holder's result",
    "replace": "runs after",
}
#: Of a call under `lock_from="publish"`, where its policy applies to the publish.
AT_PUBLISH = {"skipped": "has the holder's id", "failed": "fails in the caller"}
#: Keys of a task that stay.
KEPT = {"fence", "history", "registry", "stats"}
#: Keys of a task that expire when nothing has run for a while (docs/project/keys.md); `check` is that of a worker that starts.
EXPIRING = {"check", "recent", "replaced", "slots", "starts", "used", "waiting"}
#: Seconds for which a case waits for what may take long.
LATE = 100.0
#: Options of a call whose lock is to expire soon.
EXPIRES_SOON = {"lock_options": {"lock_ttl": 4.0}}
#: Seconds of a call to a store that is away: more than a moment of slowness.
STORE_TIMEOUT = 4.0
#: The cases wait for each other's places.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
#: Cases that run side by side. Each occupies up to three children.
SIDE_BY_SIDE = 10


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    program = ("-m", "celery", "-A", "tests.overlap.pairs_app")
    return [WorkerSpec("prefork", 2 * SIDE_BY_SIDE + 4, program=program)]


@pytest.fixture(scope="module")
def extra_conf(own_store: RedisServer) -> dict[str, Any]:
    return {
        "singleton_lock_url": own_store.url(),
        "singleton_lock_ttl": 20.0,
        "singleton_lock_store_timeout": STORE_TIMEOUT,
    }


class Case:
    """The task with these values of options."""

    def __init__(self, app: Celery, recorder: Recorder, store: Any, values: tuple[str, ...]) -> None:
        self.task: Any = app.tasks[task_name(values)]
        self.values = values
        self.recorder = recorder
        self.store = store
        self.tag = f"pair-{LIVE.index(values)}-{secrets.token_hex(4)}"
        self.key: str = self.task.lock_key_for(self.tag)

    def has(self, value: str) -> bool:
        return any(value in (own, own.partition("=")[0]) for own in self.values)

    @property
    def is_locked(self) -> bool:
        """Whether the lock is held while a body runs."""
        return not self.has("singleton=False") and not self.has("lock_until=start")

    @property
    def outcome(self) -> str:
        """What becomes of a call that meets the running bodies."""
        if not self.is_locked:
            return "runs at once"
        policy = next(
            (value.partition("=")[2] for value in self.values if value.startswith("on_duplicate=")),
            "wait" if self.has("lock_group") else "skip",
        )
        outcome = OUTCOMES[policy]
        return AT_PUBLISH.get(outcome, outcome) if self.has("lock_from=publish") else outcome

    def send(self, acts: str = "hold", **options: Any) -> Any:
        return self.task.apply_async((self.tag, acts) if acts != "hold" else (self.tag,), **options)

    def started(self, result: Any) -> list[Event]:
        return [start for start in self.recorder.events(self.tag, "start") if start["id"] == result.id]

    def ended(self, result: Any) -> list[Event]:
        return [end for end in self.recorder.events(self.tag, "end") if end["id"] == result.id]

    def hold(self, **options: Any) -> Any:
        """Start a body that runs until `let_go`."""
        result = self.send(**options)
        (start,) = until(lambda: self.started(result), "the body starts", LATE)
        assert self.is_locked == start["protected"]
        assert start["held"] == start["protected"] or self.has("lock_at_most=less")  # which may be over by then
        return result

    def let_go(self) -> None:
        self.recorder.raise_flag(f"{self.tag}.go")

    def error(self, result: Any) -> Any:
        until(lambda: result.state == "FAILURE", f"FAILURE of {result.id}", LATE, 0.05)
        return result.result

    def value(self, result: Any) -> Any:
        until(lambda: result.state == "SUCCESS", f"SUCCESS of {result.id}", LATE, 0.05)
        return result.result

    def run(self) -> None:
        """Let bodies run and others meet them."""
        if self.has("lock_at_most=less") and self.is_locked:
            self.check_cap()
        else:
            self.check_duplicate()
        if self.has("max_starts=unsuccessful") and self.is_locked:
            self.check_starts()

    def check_cap(self) -> None:
        """Let a body go on for longer than its lease may, and another one start beside it once the lock has expired."""
        sent = time.monotonic()  # a start is recorded some time after the lock was acquired
        first = self.hold(**({} if self.has("lock_ttl") or not self.is_locked else EXPIRES_SOON))
        (lost,) = until(lambda: self.recorder.events(lock_tag(self.key), "lock_lost"), "the lease is lost", LATE)
        assert lost["at"] > sent + CAP
        if self.has("lock_ttl=60"):  # the lock will not expire soon
            assert self.value(self.send()) is None
            self.let_go()
            self.check_end()
            return
        until(lambda: self.task.lock_holder(self.tag) is None, "the lock expires", LATE)
        if self.has("on_lock_lost=raise"):
            until(lambda: first.state == "FAILURE", "the body is interrupted", LATE)
            assert isinstance(first.result, LockLost)
        second = self.send()
        until(lambda: self.started(second), "another body starts", LATE)
        assert self.has("on_lock_lost=raise") == bool(self.ended(first))
        self.let_go()
        for result in () if self.has("on_lock_lost=raise") else (first, second):
            assert "held" == self.value(result)
        self.check_end()

    def check_starts(self) -> None:
        """Let bodies fail until another one is refused."""
        for _ in range(TRIES):
            assert isinstance(self.error(self.send("raise")), Boom)
        assert isinstance(self.error(self.send("raise")), TooManyStarts)

    def check_duplicate(self) -> None:
        """Let bodies run, and another call meet them."""
        sent = time.monotonic()
        running = [self.hold() for _ in range(2 if self.has("lock_limit") else 1)]
        self.check_held(running)
        try:
            duplicate = self.meet(running[0])
        finally:
            self.let_go()
        if self.has("on_duplicate=replace") and self.has("on_lock_lost=raise"):  # it may just learn that it is to stop
            until(lambda: running[0].state in ("SUCCESS", "REVOKED"), "the replaced body has ended", LATE)
            assert "held" == self.value(duplicate)
            self.check_end()
            return
        assert ["held"] * len(running) == [self.value(result) for result in running]
        if self.outcome == "has the holder's result":
            assert "held" == self.value(duplicate)
            assert [] == self.started(duplicate)
        if self.outcome.startswith("runs"):
            assert "held" == self.value(duplicate)
            self.check_order(running, duplicate, sent)
        self.check_end()

    def check_held(self, running: list[Any]) -> None:
        if self.has("singleton=False"):
            assert not self.store.exists(self.key)
        elif self.is_locked:
            assert (running[0].id, "running") == (self.task.lock_holder(self.tag).task_id, "running")
        else:
            until(lambda: not self.store.exists(self.key), "the lock is free")

    def meet(self, first: Any) -> Any:
        """Call the task once more, and check all that is to be seen before the bodies end."""
        if self.outcome == "fails in the caller":
            with pytest.raises(DuplicateTask):
                self.send()
            return None
        duplicate = self.send()
        if self.outcome == "has the holder's id":
            assert (first.id, first.id) == (duplicate.id, duplicate.duplicate.task_id)
            return None
        if self.outcome == "runs at once":
            until(lambda: self.started(duplicate), "the other body starts", LATE)
            assert [] == self.ended(first)
            return duplicate
        met = f"{duplicate.id} is a duplicate"
        until(
            lambda: duplicate.id in [e["task_id"] for e in self.recorder.events(lock_tag(self.key), "duplicate")],
            met,
            LATE,
        )
        if self.outcome == "skipped":
            assert self.value(duplicate) is None
        elif self.outcome == "failed":
            assert isinstance(self.error(duplicate), DuplicateTask)
        # With both of these, the first body is interrupted within a second, and the other one starts.
        if not (self.has("on_duplicate=replace") and self.has("on_lock_lost=raise")):
            assert [] == self.started(duplicate)
        return duplicate

    def check_order(self, running: list[Any], duplicate: Any, sent: float) -> None:
        (start,) = self.started(duplicate)
        if self.outcome == "runs after":
            assert start["at"] > min(self.ended(result)[0]["at"] for result in running)
        if self.outcome == "runs after" and self.has("lock_at_least"):
            assert start["at"] > sent + COOLDOWN

    def check_end(self) -> None:
        """The lock is free, or held after a success, and nothing is left but what expires, or is kept for each task name."""
        if self.has("lock_at_least") and self.is_locked:
            assert "cooldown" == until(lambda: self.task.lock_holder(self.tag), "a cooldown").state
            self.task.force_unlock(self.tag)
        until(lambda: not self.store.exists(self.key), "the lock is free")
        base = self.key.partition("lock:")[0]
        left = {
            str(key).removeprefix(base).partition(":")[0]: self.store.pttl(key)
            for key in self.store.scan_iter(f"{base}*")
        }
        assert left.keys() <= EXPIRING | KEPT
        assert {name for name in left if left[name] == -1} <= KEPT


@pytest.fixture(scope="module")
def celery_setup_app(celery_setup_app: Celery) -> Celery:
    """Return the tests' app with the worker's tasks."""
    add_pairs(celery_setup_app, perform)
    return celery_setup_app


@pytest.fixture(scope="module")
def cases(
    celery_setup_app: Celery,
    celery_worker_cluster: CeleryWorkerCluster,
    recorder: Recorder,
    own_store: RedisServer,
) -> Iterator[dict[tuple[str, ...], Case]]:
    """Yield all cases."""
    client = redis.Redis.from_url(own_store.url(), decode_responses=True)
    with contextlib.closing(client):
        yield {values: Case(celery_setup_app, recorder, client, values) for values in LIVE}


@pytest.fixture(scope="module")
def outcomes(cases: dict[tuple[str, ...], Case]) -> Iterator[dict[tuple[str, ...], Future[None]]]:
    """Run all cases, some side by side; yield what becomes of each."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        yield {values: threads.submit(case.run) for values, case in cases.items()}


@pytest.mark.parametrize("pair", ALLOWED, ids="+".join)
def test_pair(outcomes: dict[tuple[str, ...], Future[None]], pair: Pair) -> None:
    """The first call runs, a second one has the outcome of its policy, and then the lock is free, or held as documented."""
    outcomes[case_of(pair)].result()


@pytest.mark.parametrize("name", ["default", "run", "raise"])
def test_pairs_without_a_store(cases: dict[tuple[str, ...], Case], own_store: RedisServer, name: str) -> None:
    """While the store is away, a call has the outcome of its `on_store_error`, whatever the other option is."""
    found = [case for case in cases.values() if case.has(f"on_store_error={name}")] or [cases[()]]
    own_store.pause()
    try:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            list(threads.map(lambda case: check_without_store(case, name), found))
    finally:
        own_store.resume()


def check_without_store(case: Case, name: str) -> None:
    """Check what becomes of a call of a task that meets a store that is away."""
    has_lock = not case.has("singleton=False")
    if has_lock and name == "raise" and case.has("lock_from=publish"):
        with pytest.raises(StoreUnavailable):
            case.send("return")
        return
    result = case.send("return")
    if has_lock and name == "raise":
        assert isinstance(case.error(result), StoreUnavailable)
    elif has_lock and name == "default":
        until(lambda: result.state == "RETRY", "RETRY", LATE)
    else:
        assert "done" == case.value(result)
        (start,) = case.started(result)
        assert not start["protected"]


# -- pairs that need a word ------------------------------------------------------------------------


def state_of(env: WorkerEnvironment, name: str) -> str:
    """Return the state of the holder of a task's lock, "" if it is free."""
    found = env.job(name).lock_holder(env.tag)  # type: ignore[attr-defined]
    return found.state if found else ""


def test_publish_of_a_task_that_may_not_start(env: WorkerEnvironment) -> None:
    """A publish is no start: the message is refused by the worker, which frees its reservation."""
    task = env.job("other.publish_tried")
    assert isinstance(env.error(task.delay(env.tag, "raise")), Boom)
    refused = task.delay(env.tag)
    assert isinstance(env.error(refused), TooManyStarts)
    until(lambda: state_of(env, "other.publish_tried") == "", "the lock is free")
    assert 1 == len(env.starts())


def test_publish_in_a_cooldown(env: WorkerEnvironment) -> None:
    """In the cooldown of a success, a call is not published, and returns the result of that success."""
    task = env.job("other.publish_held")
    first = task.delay(env.tag, "return")
    assert "done" == env.get(first)
    again = task.delay(env.tag, "return")
    assert (first.id, "cooldown") == (again.id, again.duplicate.state)
    assert "done" == env.get(again)


def test_line_that_meets_a_cooldown(env: WorkerEnvironment) -> None:
    """A message that joins the line during a cooldown runs at its end, however long `lock_ttl` is."""
    task, sent = env.job("other.wait_held"), time.monotonic()
    assert "done" == env.get(task.delay(env.tag, "return"))
    assert "cooldown" == state_of(env, "other.wait_held")
    assert "done" == env.get(task.delay(env.tag, "return"))
    second = env.starts()[1]["at"]
    assert sent + COOLDOWN < second < sent + LONGEST_COPY_DELAY


def test_line_behind_a_capped_body(env: WorkerEnvironment) -> None:
    """A message in line does not wait for a body whose lease has ended at `lock_at_most`: both run at once."""
    task = env.job("other.wait_capped")
    env.hold("other.wait_capped", acts=["hold", "return"])
    assert "done" == env.get(task.delay(env.tag, "return"))
    assert 2 == len(env.starts())
    assert ["return"] == [start["act"] for start in env.starts() if start["number"] == 1]
    assert 1 == len(env.events("end"))


def test_joined_body_with_a_cap(env: WorkerEnvironment) -> None:
    """A message that follows a body that goes on after the cap runs beside it, once it has found the lock free twice."""
    first = env.hold("other.join_capped")
    assert "done" == env.get(env.job("other.join_capped").delay(env.tag, "return"))
    assert [] == [end for end in env.events("end") if end["id"] == first.id]
    env.let_go()
    assert "held" == env.get(first)


def test_own_retry_until_start(env: WorkerEnvironment) -> None:
    """With `lock_until="start"`, a retry keeps no reservation: a new call is published during its countdown."""
    task = env.job("other.retry_until_start")

    def attempt(seconds: float) -> Any:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        first = task.delay(tag, ["retry", "return"], seconds)
        env.wait_for_state(first, "RETRY", "SUCCESS")
        second = task.delay(tag, "return")
        value, state = env.get(second), first.state
        if time.monotonic() > sent + seconds:
            return None
        assert (None, "done", "RETRY") == (second.duplicate, value, state)
        return first

    assert "done" == env.get(in_time(attempt))


def test_policy_that_is_chosen_twice(env: WorkerEnvironment) -> None:
    """A callable policy is asked at the publish and, if the call is published, again at the start."""
    first = env.hold("other.chosen_twice")
    second = env.job("other.chosen_twice").delay(env.tag, "return")
    assert (first.id, first.id) == (second.duplicate.task_id, env.error(second).holder.task_id)
    env.let_go()
    assert "held" == env.get(first)


def test_body_without_a_lock(env: WorkerEnvironment, own_store: RedisServer) -> None:
    """A run without a lock, as the store is away, leaves no cooldown, is no start that counts, and has no cap."""
    task, capped = env.job("other.unlocked"), env.job("other.unlocked_capped")
    own_store.pause()
    try:
        results = [task.delay(env.tag, acts) for acts in ("return", "raise")]
        long = capped.delay(env.tag, "sleep", 1.5 * CAP)
        assert ("done", Boom, "slept") == (env.get(results[0]), type(env.error(results[1])), env.get(long))
    finally:
        own_store.resume()
    until(lambda: state_of(env, "other.unlocked") == "", "what was granted too late is free again")
    assert "done" == env.get(task.delay(env.tag, "return"))
    assert "cooldown" == state_of(env, "other.unlocked")
    assert isinstance(env.error(capped.delay(env.tag, "sleep", 60.0)), LockLost)


def test_own_retry_and_a_cooldown(env: WorkerEnvironment) -> None:
    """An own retry leaves no cooldown; the success after it leaves one."""
    job = env.job("other.retry_held")

    def attempt(seconds: float) -> tuple[str, Any] | None:
        tag, sent = env.other_tag(f"{seconds:g}"), time.monotonic()
        result = job.delay(tag, ["retry", "return"], seconds)
        env.wait_for("end", tag)
        until(lambda: job.lock_holder(tag) is None or result.ready(), "the lock is free")  # type: ignore[attr-defined]
        return (tag, result) if time.monotonic() < sent + seconds else None

    tag, result = in_time(attempt)
    assert "done" == env.get(result)
    assert "cooldown" == job.lock_holder(tag).state  # type: ignore[attr-defined]


def test_own_retry_is_a_start(env: WorkerEnvironment) -> None:
    """Each own retry is a start of its own, so `MaxStarts` may refuse it."""
    result = env.job("other.retry_tried").delay(env.tag, "retry")
    assert isinstance(env.error(result), TooManyStarts)
    assert 2 == len(env.starts())


def test_cooldown_of_a_group(env: WorkerEnvironment) -> None:
    """A success leaves a cooldown for the whole group."""
    assert "done" == env.get(env.job("other.held").delay(env.tag, "return"))
    assert env.get(env.job("other.also_held").delay(env.tag, "return")) is None


def test_starts_of_a_group(env: WorkerEnvironment) -> None:
    """The starts of all tasks of a group count together."""
    assert isinstance(env.error(env.job("other.tried").delay(env.tag, "raise")), Boom)
    assert isinstance(env.error(env.job("other.also_tried").delay(env.tag, "return")), TooManyStarts)


def test_replaced_by_another_of_its_group(env: WorkerEnvironment) -> None:
    """A newcomer replaces another task of its group, and runs once that has ended."""
    first = env.hold("other.replaced", acts="obey")
    second = env.job("other.also_replaced").delay(env.tag, "return")
    assert ("obeyed", "done") == (env.get(first), env.get(second))
    (ended,) = [end for end in env.events("end") if end["id"] == first.id]
    assert env.starts()[1]["at"] > ended["at"]


def test_publish_of_a_group(env: WorkerEnvironment) -> None:
    """Under "skip", a call that meets another task of its group at the publish returns that task's result."""
    first = env.hold("other.publish", acts="hold")
    again = env.job("other.also_publish").delay(env.tag, "return")
    assert (first.id, first.id) == (again.id, again.duplicate.task_id)
    env.let_go()
    assert "held" == env.get(again)
