"""What the examples of the reference do when they run: the promise of the text around them."""

from __future__ import annotations

from typing import Any

import pytest
from celery import group

from celery_singleton_lock import Holder, LockLost, Raise, SingletonMixin, SingletonTask, Skip, signals
from celery_singleton_lock.testing import locked
from tests.servers import until
from tests.unit.conftest import MakeApp
from tests.unit.site import Run


def count(item: int) -> int:
    """Return the item: the body of the tests' own tasks."""
    return item


def test_group() -> None:
    """An account is not closed while it is billed; another one is."""
    with Run("docs/reference/options.md") as page, locked(page["bill"], 42):
        assert "DuplicateTask" == type(page["close"].apply((42, "moved")).result).__name__
        assert "account 43 closed" == page["close"].apply((43,)).result


def test_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call publishes nothing, and says that the first one is queued."""
    with Run("docs/reference/options.md") as page:
        sent = []

        def send_task(name: str, *args: Any, task_id: str = "", **options: Any) -> Any:
            sent.append(name)
            return page["app"].AsyncResult(task_id)

        page["app"].conf.task_always_eager = False
        monkeypatch.setattr(page["app"], "send_task", send_task)
        assert ["started", "already queued"] == [page["show_report"](42) for _ in range(2)]
        assert ["shop.tasks.report"] == sent


def test_max_starts() -> None:
    """A report that fails three times is not tried a fourth time."""
    with Run("docs/reference/options.md") as page:

        def fail() -> float:
            return 1 / 0

        report = page["app"].task(base=SingletonTask, max_starts=page["hourly_report"].max_starts)(fail)
        ends = [type(report.apply().result).__name__ for _ in range(4)]
    assert ["ZeroDivisionError"] * 3 + ["TooManyStarts"] == ends


def test_run_once_more() -> None:
    """The block's task runs; what an eager duplicate does is what it does under "raise"."""
    with Run("docs/reference/policies.md") as page:
        assert "index" == page["rebuild_index"].apply().result
        with locked(page["rebuild_index"]):
            assert "DuplicateTask" == type(page["rebuild_index"].apply().result).__name__


def test_replace(capsys: pytest.CaptureFixture[str]) -> None:
    """The block's task prints all pages while nobody replaces it, and without a lock."""
    with Run("docs/reference/policies.md") as page:
        assert "SUCCESS" == page["preview"].apply(("a", 1)).state
        page["preview"]("b", 2)
    assert 200 == len(capsys.readouterr().out.splitlines())


def test_policy_case_by_case() -> None:
    """The function works as a policy: it raises if the holder is old, and skips otherwise."""
    with Run("docs/reference/policies.md") as page:
        assert Raise() == page["by_age"](None, Holder(age=3601.0))
        assert Skip() == page["by_age"](None, Holder(age=3600.0))
        with locked(page["import_rates"]):
            assert ("SUCCESS", None) == (page["import_rates"].apply().state, page["import_rates"].apply().result)


def test_lease(capsys: pytest.CaptureFixture[str]) -> None:
    """A body that asks between its steps stops after its lock was released by force."""
    with Run("docs/reference/results-exceptions-lease.md") as page:
        export = page["export"]
        page["app"].conf.singleton_lock_ttl = 6.0
        assert "SUCCESS" == export.apply((42,)).state
        assert 100 == len(capsys.readouterr().out.splitlines())

        def lose(text: str) -> None:
            export.force_unlock(43)
            until(lambda: not export.lease.held, "the loss is known")

        page.names["print"] = lose
        assert LockLost is type(export.apply((43,)).result)


def test_results_without_a_duplicate(make_app: MakeApp) -> None:
    """The page of results says which of them have the attribute `duplicate`, and which have not."""
    app = make_app()
    sync = app.task(base=SingletonTask, name="shop.tasks.sync", shared=False)(count)
    for result in (sync.delay(1), sync.apply_async((2,)), sync.s(3).apply_async()):
        assert result.duplicate is None
    others = [app.send_task("shop.tasks.sync", (1,)), *group(sync.s(1), sync.s(2)).apply_async(), sync.AsyncResult("1")]
    assert not [result for result in others if hasattr(result, "duplicate")]


def test_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """A lost lease calls the receiver with task and key."""
    with Run("docs/reference/signals-events-logs.md") as page, Run("docs/reference/per-call.md") as other:
        printed: list[str] = []
        page.names["print"] = printed.append

        def body(self: Any) -> None:
            self.force_unlock()
            until(lambda: printed, "the alarm")

        lost = other["app"].task(base=SingletonTask, name="lost", lock_ttl=1.0, bind=True)(body)
        assert "SUCCESS" == lost.apply().state
        assert [f"lost lost {lost.lock_key_for()}"] == printed
        signals.lock_lost.disconnect(page["alarm"])


def test_options_for_one_call() -> None:
    """The call with a key of its own does not wait for the account; the other one fails."""
    with Run("docs/reference/per-call.md") as page, locked(page["sync"], 42), locked(page["sync"], 43):
        results: list[Any] = []
        apply_async = page["sync"].apply_async
        page["sync"].apply_async = lambda *args, **named: results.append(apply_async(*args, **named))
        page["sync_now"](42)
        page["sync_customer"](43)
    assert ["DuplicateTask", "str"] == [type(result.result).__name__ for result in results]


def test_django() -> None:
    """The task class for Django makes a locked task that keeps `delay_on_commit`."""
    pytest.importorskip("django")
    pytest.importorskip("celery.contrib.django.task", reason="Celery 5.3 has no task class for Django")
    with Run("docs/reference/settings.md") as page, locked(page["close_books"], 1):
        task = page["close_books"]
        assert isinstance(task, SingletonMixin)
        assert callable(task.delay_on_commit)
        assert callable(task.apply_async_on_commit)
        assert [None, "books of 2 closed"] == [task.apply((item,)).get() for item in (1, 2)]
