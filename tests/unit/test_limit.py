"""The option `lock_limit`: how many run at once, what their leases are, and what a callable is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, LockKeyError, StoreUnavailable
from celery_singleton_lock.config.exclusions import EXCLUSIONS
from celery_singleton_lock.config.options import TASK_OPTIONS
from celery_singleton_lock.config.task_config import config_for
from celery_singleton_lock.context import context_of
from celery_singleton_lock.testing import assert_free, assert_held, locked
from tests.unit.fake_store import FakeStore
from tests.unit.test_execution import MovableClock, clock, raising, renew_due, store  # noqa: F401
from tests.unit.test_task import Singleton, deliver


@pytest.mark.parametrize("limit", [1, 3, lambda: 3, lambda: 1], ids=["1", "3", "callable-3", "callable-1"])
def test_so_many_and_no_more(singleton: Singleton, limit: Any) -> None:
    """So many tasks hold the lock at once, the next one is a duplicate, and the end of one lets another run."""
    number = limit() if callable(limit) else limit

    @singleton(name="x", lock_limit=limit)
    def task() -> str:
        return "ran"

    with ExitStack() as stack:
        holders = [stack.enter_context(locked(task)) for _ in range(number - 1)]
        with locked(task) as last:
            assert task.apply().result is None
            with pytest.raises(AssertionError, match="held"), locked(task):
                pass
            assert (holders or [last])[0].task_id == assert_held(task).task_id
        assert "ran" == task.apply().result
    assert_free(task)


def test_lease_of_a_slot(singleton: Singleton) -> None:
    """A lease of a slot is protected, named after its slot, and has no fence."""
    seen: list[Any] = []

    @singleton(name="x", bind=True, lock_limit=3)
    def task(self: Any) -> None:
        seen.append((self.lease.held, self.lease.protected, self.lease.key, self.lease.fence))

    key = task.lock_key_for()
    deliver(task)
    with locked(task):
        deliver(task)
    task()
    assert [(True, True, key, None), (True, True, f"{key}:1", None), (False, False, "", 0)] == seen


def test_callable_of_one_has_no_fence(singleton: Singleton) -> None:
    """A callable counts as a limit above 1: another call may have had more."""

    @singleton(name="x", bind=True, lock_limit=lambda: 1)
    def task(self: Any) -> Any:
        return self.lease.fence

    assert deliver(task).retval is None


def test_callable_gets_the_arguments_by_name(singleton: Singleton) -> None:
    """A callable gets what it names, defaults filled in, as a callable `lock_key` does; each call has its own limit."""
    given: list[Any] = []

    def limit(plan: str, customer: int, missing: str = "-", **rest: Any) -> int:
        given.append((plan, customer, missing, rest))
        return {"free": 1, "paid": 3}[plan]

    @singleton(name="x", unique_on="customer", lock_limit=limit)
    def task(customer: int, plan: str = "free", page: int = 1) -> str:
        return "ran"

    config = config_for(task)
    assert [1, 3, 3] == [
        config.limit(*call) for call in (((7,), {}), ((7, "paid"), {}), ((), {"customer": 7, "plan": "paid"}))
    ]
    assert [("free", 7, "-", {"page": 1})] == given[:1]
    with locked(task, 7, "paid"):
        assert ["ran", None, "ran"] == [task.apply(call).result for call in ((7, "paid"), (7,), (8,))]


@pytest.mark.parametrize("answer", [0, -1, True, 2.0, "3", None])
def test_answer_that_is_no_limit(singleton: Singleton, answer: Any) -> None:
    """An answer that is no whole number from 1 fails the task with an error that names task, option and answer."""

    @singleton(name="x", lock_limit=lambda: answer)
    def task() -> None:
        pytest.fail("must not run")

    result = task.apply()
    assert isinstance(result.result, ConfigurationError)
    assert f"task x: lock_limit returned {answer!r}" in str(result.result)


def test_callable_that_raises(singleton: Singleton) -> None:
    """An error of the callable is the task's error; nothing is held."""

    @singleton(name="x", lock_limit=lambda customer: {}[customer])
    def task(customer: int) -> None:
        pytest.fail("must not run")

    assert isinstance(task.apply((7,)).result, KeyError)
    assert_free(task, 7)


def test_hidden_argument(singleton: Singleton) -> None:
    """A call that does not name what the callable needs is refused with the names of option and parameter."""

    @singleton(name="x", unique_on=[], lock_limit=lambda customer: 3)
    def task(**named: Any) -> None:
        pytest.fail("must not run")

    result = task.apply()
    assert isinstance(result.result, LockKeyError)
    assert "parameter 'customer': lock_limit needs it" in str(result.result)


def test_force_unlock_revokes_the_oldest(singleton: Singleton) -> None:
    """`force_unlock` revokes the oldest holder alone; called again, the next one."""

    @singleton(name="x", lock_limit=2)
    def task() -> None: ...

    with locked(task) as first, locked(task) as second:
        assert [first.task_id, second.task_id] == [task.force_unlock().task_id, task.force_unlock().task_id]
        assert task.force_unlock() is None


def test_unanswered_grant_is_released(singleton: Singleton, store: FakeStore) -> None:  # noqa: F811
    """A slot whose grant was not answered is found by its token and released."""

    @singleton(name="x", lock_limit=2, on_store_error="raise")
    def task() -> None:
        pytest.fail("must not run")

    with locked(task) as holder:
        store.on_answer = [raising(StoreUnavailable("the answer was lost"))]
        assert "FAILURE" == deliver(task).info.state
        with pytest.raises(AssertionError), locked(task):
            pass
        renew_due(task)
        with locked(task):
            assert holder.task_id == assert_held(task).task_id


def test_late_grant_is_acquired_again(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:  # noqa: F811
    """A grant that came too late is asked for again, in the same slot or another, and leaves no second one."""

    @singleton(name="x", bind=True, lock_limit=3)
    def task(self: Any) -> str:
        return str(self.lease.key)

    with locked(task):
        store.on_answer = [lambda: clock.advance(31.0)]
        assert f"{task.lock_key_for()}:1" == deliver(task).retval
    assert_free(task)


def test_slot_is_reacquired(singleton: Singleton, store: FakeStore, clock: MovableClock) -> None:  # noqa: F811
    """A body whose store lost its data reacquires the slot that it had."""

    @singleton(name="x", bind=True, lock_limit=2)
    def task(self: Any) -> bool:
        store.lose()
        clock.advance(11.0)
        renew_due(self)
        assert "id-1" == store.holder(self.lease.key).task_id  # type: ignore[union-attr]
        return bool(self.lease.held)

    with locked(task):
        assert deliver(task).retval
    assert_free(task)


def test_supervisor_knows_of_the_limit(app: Celery, singleton: Singleton) -> None:
    """The main process renews a child's slot by its token, and notes it as held."""
    from celery_singleton_lock.worker.request import DeliveryMixin

    class Request(DeliveryMixin):
        def __init__(self, task: Any) -> None:
            self.task, self.id, self.hostname, self._token = task, "id-1", "node", "t0ken"
            self.request_dict: dict[str, Any] = {}

    for name, limit, expected in (("one", 1, 0), ("three", 3, 1), ("callable", lambda: 3, 1)):

        @singleton(name=name, lock_limit=limit)
        def task() -> None: ...

        spec = Request(task)._lease_request(1)
        assert (expected, True) == (spec.limit, spec.by_token)
    assert context_of(app)


def test_plain_task_has_no_slots(singleton: Singleton) -> None:
    """A task without a limit asks for a lock without slots."""

    @singleton(name="x")
    def task() -> None: ...

    assert 0 == config_for(task).limit((), {})
    assert "" == config_for(task).lock_keys((), {})[1]


def test_exclusions_name_options() -> None:
    """Each rule about options that exclude each other names two options, and ends a sentence."""
    rules: list[tuple[str, str, Callable[..., bool], str]] = EXCLUSIONS
    assert all({one, other} <= TASK_OPTIONS.keys() and reason and one != other for one, other, _, reason in rules)
