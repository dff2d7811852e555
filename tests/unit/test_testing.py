"""What users' tests are given."""

from __future__ import annotations

from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.testing import assert_free, assert_held, hold, memory_store
from tests.unit.conftest import MakeApp


def sync_account(account: int) -> str:
    return f"synced {account}"


def redis_app(make_app: MakeApp, **settings: Any) -> Any:
    """An app as a user has it: configured for a Redis, which is not there."""
    app = make_app(singleton_lock_url="redis://127.0.0.1:1/0", **settings)
    app.task(base=SingletonTask, name="sync")(sync_account)
    return app


def test_duplicate_without_redis(make_app: MakeApp) -> None:
    """A held signature makes an eager run a duplicate; another signature runs; afterwards it is free."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app):
        with hold(sync, 42) as holder:
            assert sync.apply((42,)).result is None
            assert "synced 43" == sync.apply((43,)).result
            assert holder.task_id == assert_held(sync, 42).task_id
            with pytest.raises(AssertionError, match="held"):
                assert_free(sync, 42)
        assert_free(sync, 42)
        assert "synced 42" == sync.apply((42,)).result
        with pytest.raises(AssertionError, match="free"):
            assert_held(sync, 42)


def test_hold_twice_is_an_error(make_app: MakeApp) -> None:
    """A signature that is held cannot be held again, and the failure names key and holder."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app), hold(sync, 42), pytest.raises(AssertionError, match="held-by-test"), hold(sync, account=42):
        pass


def test_store_is_empty_at_first(make_app: MakeApp) -> None:
    """Each use begins without locks, whatever was left held before."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app):
        left = hold(sync, 42)
        left.__enter__()
    with memory_store(app):
        assert_free(sync, 42)


def test_settings_are_as_before_afterwards(make_app: MakeApp) -> None:
    """After the block the app's own settings count again, also where they had not been given."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    key = sync.lock_key_for(42)
    with memory_store(app):
        sync.apply((42,))
    assert key == sync.lock_key_for(42)
    assert "redis://127.0.0.1:1/0" == app.conf.singleton_lock_url
    assert not app.conf.get("singleton_lock_eager", False)
    assert "synced 42" == sync.apply((42,)).result


def test_settings_are_as_before_after_a_failure(make_app: MakeApp) -> None:
    """They are put back when the block fails, too."""
    app = redis_app(make_app)
    with pytest.raises(ZeroDivisionError), memory_store(app):
        raise ZeroDivisionError
    assert app.tasks["sync"].lock_key_for(42)
    assert "redis://127.0.0.1:1/0" == app.conf.singleton_lock_url


def test_keys_are_the_same_inside(make_app: MakeApp) -> None:
    """A key is made as it would be outside of the block: prefix setting included."""
    app = redis_app(make_app, singleton_lock_prefix="shop")
    sync = app.tasks["sync"]
    key = sync.lock_key_for(42)
    with memory_store(app):
        assert key == sync.lock_key_for(42)
        with hold(sync, 42):
            assert sync.lock_holder(42)


def test_an_app_without_any_store(make_app: MakeApp) -> None:
    """An app that names no store can be tested, and afterwards still says that it has none."""
    app = make_app(singleton_lock_url=None)
    sync = app.task(base=SingletonTask, name="sync")(sync_account)
    with memory_store(app):
        assert "synced 1" == sync.apply((1,)).result
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        sync.lock_key_for(1)


def test_nested_use(make_app: MakeApp) -> None:
    """An inner block has a store of its own; the outer one's locks are there again after it."""
    app = redis_app(make_app)
    sync = app.tasks["sync"]
    with memory_store(app), hold(sync, 42):
        with memory_store(app):
            assert_free(sync, 42)
        assert_held(sync, 42)


def test_policies_can_be_tested(make_app: MakeApp) -> None:
    """A task's own policy decides about the duplicate."""
    app = redis_app(make_app)
    loud = app.task(base=SingletonTask, name="loud", on_duplicate="raise")(sync_account)
    with memory_store(app), hold(loud, 1):
        assert "DuplicateTask" == type(loud.apply((1,)).result).__name__
