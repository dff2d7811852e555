"""What becomes of a granted run and of a duplicate, alone and in chains, groups and chords."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states, uuid
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, GroupResult

from celery_singleton_lock import DuplicateTask
from tests.integration.bench import Bench
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.tasks import make_app
from tests.servers import until


def steps_of(bench: Bench, *suffixes: str) -> list[Any]:
    """Return plain steps, one for each suffix, which record that they ran."""
    return [bench.app.tasks["then"].si(bench.other_tag(suffix)) for suffix in suffixes]


def ran(bench: Bench, suffix: str) -> int:
    """Return how often a plain step ran."""
    return len(bench.events("then", bench.other_tag(suffix)))


def duplicate_of(bench: Bench, name: str) -> Any:
    """Return a signature of the bench's work, which another run holds."""
    return bench.job(name).si(bench.tag)


def other(bench: Bench, name: str = "skip") -> Any:
    """Return a signature of other work."""
    return bench.job(name).si(bench.other_tag("other"))


def collect(bench: Bench) -> Any:
    """Return a chord's body, which records what it was given."""
    return bench.app.tasks["collect"].s(bench.other_tag("collected"))


def collected(bench: Bench) -> list[Any]:
    """Return what the chord's body was given, for each of its runs."""
    return [event["results"] for event in bench.events("collect", bench.other_tag("collected"))]


def failed_with(bench: Bench, result: AsyncResult, error: type[Exception]) -> bool:
    """Tell whether a result is a failure with an error of this class."""
    return isinstance(bench.error(result), error) and result.state == states.FAILURE


def assert_become(bench: Bench, state: str, *results: AsyncResult) -> None:
    """Check that all of these come to this state; a waiter may see the last of them first."""
    for result in results:
        bench.wait_for_state(result, state)


def assert_only_holder_ran(bench: Bench, holder: AsyncResult) -> None:
    """Check that no body but the holder's has started."""
    assert [holder.id] == [start["id"] for start in bench.starts()]


# -- granted -------------------------------------------------------------------------------------


class TestGranted:
    def test_single(self, bench: Bench) -> None:
        """A granted run is as without the lock, and tells that it has it."""
        result = bench.job("skip").delay(bench.tag)
        assert "done" == bench.get(result)
        assert states.SUCCESS == result.state
        (start,) = bench.starts()
        assert start["held"] is True
        assert start["protected"] is True
        assert start["key"] == bench.key()
        until(lambda: bench.lock_signals(bench.key(), "lock_released"), "lock_released")
        assert [event["what"] for event in bench.lock_signals(bench.key())] == [
            "lock_acquired",
            "lock_released",
        ]

    def test_failure(self, bench: Bench) -> None:
        """A failure of the body is as without the lock: state, errback, nothing after it."""
        errback = bench.app.tasks["errback"].s(bench.other_tag("error"))
        result = bench.job("skip").apply_async((bench.tag, "raise"), link_error=errback)
        assert "Boom" == type(bench.error(result)).__name__
        assert "Boom" == bench.wait_for("errback", bench.other_tag("error"))["error"]

    def test_chain(self, bench: Bench) -> None:
        """A chain goes on after a granted step."""
        last = chain(bench.job("skip").si(bench.tag), *steps_of(bench, "a"), other(bench))()
        assert "done" == bench.get(last)
        assert 1 == ran(bench, "a")

    def test_chord(self, bench: Bench) -> None:
        """A chord counts granted members, and its body may be locked too."""
        header = [bench.job("skip").si(bench.tag), other(bench)]
        assert ["done", "done"] == bench.get(chord(header)(collect(bench)))
        assert "done" == bench.get(chord(header)(other(bench)))

    def test_countdown_longer_than_the_ttl(self, bench: Bench) -> None:
        """A run that waits for its time holds nothing meanwhile, however short the TTL; its body is protected as any other."""
        job, sent = bench.job("skip_shortest"), time.monotonic()
        later = job.apply_async((bench.tag, "hold"), countdown=2.5)
        bench.worker.wait_for_lines(later.id, "received")
        assert "done" == bench.get(job.delay(bench.tag))
        while time.monotonic() < sent + 2.0:
            assert not bench.is_locked("skip_shortest")
            time.sleep(0.05)
        start = bench.wait_for("start", count=2)
        assert (later.id, True, True) == (start["id"], start["protected"], start["held"])
        until(lambda: time.monotonic() > start["at"] + 1.5, "longer than the TTL")
        assert bench.get(job.delay(bench.tag)) is None
        bench.let_go()
        assert "held" == bench.get(later)
        assert 2 == len(bench.starts())

    def test_group(self, bench: Bench) -> None:
        """A group of different work runs as without the lock."""
        tags = [bench.other_tag(str(number)) for number in range(6)]
        result = group(bench.job("skip").si(tag) for tag in tags)()
        assert ["done"] * 6 == result.get(timeout=20)


# -- duplicate, skip -----------------------------------------------------------------------------


class TestSkip:
    @pytest.mark.parametrize(("name", "value"), [("skip", None), ("skip_value", "already")])
    def test_single(self, bench: Bench, name: str, value: str | None) -> None:
        """A skipped duplicate is a SUCCESS with the policy's result; its body does not run."""
        holder = bench.hold(name)
        duplicate = bench.job(name).delay(bench.tag)
        assert value == bench.get(duplicate)
        assert states.SUCCESS == duplicate.state
        assert_only_holder_ran(bench, holder)
        bench.let_go()
        assert "held" == bench.get(holder)

    def test_sent_by_name(self, bench: Bench) -> None:
        """A publisher that knows a task by its name alone gets the same lock, whichever way it spells the call."""
        with Celery("stranger", set_as_current=False) as stranger:
            for setting in ("broker_url", "result_backend", "task_default_queue"):
                stranger.conf[setting] = bench.app.conf[setting]
            holder = stranger.send_task("job.skip_value", (bench.tag, ["hold", "return"]))
            bench.wait_for("start")
            duplicate = stranger.send_task("job.skip_value", kwargs={"tag": bench.tag})
            assert "already" == bench.get(duplicate)
            bench.let_go()
            assert "held" == bench.get(holder)
            assert "job.skip_value" not in stranger.tasks
            assert_only_holder_ran(bench, holder)

    def test_chain_first(self, bench: Bench) -> None:
        """The rest of the chain is not run and is REVOKED, so that waiting for it ends."""
        bench.hold()
        last = chain(duplicate_of(bench, "skip"), *steps_of(bench, "a", "b"))()
        assert isinstance(bench.error(last), TaskRevokedError)
        assert_become(bench, states.REVOKED, last, last.parent)
        assert_become(bench, states.SUCCESS, last.parent.parent)
        assert ran(bench, "a") == ran(bench, "b") == 0

    def test_chain_middle(self, bench: Bench) -> None:
        """What came before the duplicate ran; what comes after it is REVOKED."""
        bench.hold()
        before, after = steps_of(bench, "before", "after")
        last = chain(before, duplicate_of(bench, "skip"), after)()
        assert isinstance(bench.error(last), TaskRevokedError)
        assert_become(bench, states.SUCCESS, last.parent)
        assert (1, 0) == (ran(bench, "before"), ran(bench, "after"))

    def test_chain_last(self, bench: Bench) -> None:
        """A duplicate at the end of a chain gives the chain the policy's result."""
        bench.hold("skip_value")
        last = chain(*steps_of(bench, "a"), duplicate_of(bench, "skip_value"))()
        assert "already" == bench.get(last)

    def test_group(self, bench: Bench) -> None:
        """A member of a group counts as done with the policy's result."""
        bench.hold("skip_value")
        result = group(duplicate_of(bench, "skip_value"), other(bench))()
        assert ["already", "done"] == result.get(timeout=20)

    def test_chord(self, bench: Bench) -> None:
        """A member of a chord counts as done, and the body gets the policy's result."""
        bench.hold("skip_value")
        result = chord([duplicate_of(bench, "skip_value"), other(bench)])(collect(bench))
        assert ["already", "done"] == bench.get(result)
        assert [["already", "done"]] == collected(bench)

    def test_chord_of_duplicates_only(self, bench: Bench) -> None:
        """A chord all of whose members are duplicates still runs its body, once."""
        bench.hold()
        result = chord([duplicate_of(bench, "skip")] * 3)(collect(bench))
        assert [None, None, None] == bench.get(result)
        assert [[None, None, None]] == collected(bench)

    def test_chord_body(self, bench: Bench) -> None:
        """A chord's body may be the duplicate."""
        bench.hold("skip_value")
        result = chord([other(bench)])(duplicate_of(bench, "skip_value"))
        assert "already" == bench.get(result)

    def test_chord_body_in_a_chain(self, bench: Bench) -> None:
        """What follows a chord whose body is the duplicate is not run and is REVOKED."""
        holder = bench.hold("skip_value")
        steps = [duplicate_of(bench, "skip_value"), *steps_of(bench, "a", "b")]
        # Celery 5.5 and before has no way from the last result to that of the body.
        body, a, b = (bench.app.AsyncResult(step.set(task_id=uuid()).id) for step in steps)
        last = chain(chord([other(bench)], steps[0]), *steps[1:])()
        assert b.id == last.id
        assert isinstance(bench.error(last), TaskRevokedError)
        assert_become(bench, states.REVOKED, a, b)
        assert "already" == bench.get(body)
        assert ran(bench, "a") == ran(bench, "b") == 0
        assert_only_holder_ran(bench, holder)

    def test_chain_inside_a_chord_header(self, bench: Bench) -> None:
        """That member is REVOKED, and the chord's body fails as Celery has it: it never hangs."""
        bench.hold()
        broken = chain(duplicate_of(bench, "skip"), *steps_of(bench, "a"))
        result = chord([broken, other(bench)])(collect(bench))
        assert bench.chord_failed(result)
        assert_become(bench, states.REVOKED, result.parent.results[0])
        assert 0 == ran(bench, "a")
        assert [] == collected(bench)

    def test_chain_inside_a_group(self, bench: Bench) -> None:
        """Waiting for a group with such a chain ends; its other members are untouched."""
        bench.hold()
        broken = chain(duplicate_of(bench, "skip"), *steps_of(bench, "a"))
        result = group(broken, other(bench))()
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert "done" == bench.get(result.results[1])

    def test_dropped_group(self, bench: Bench) -> None:
        """Every member of a group that is dropped is REVOKED."""
        bench.hold()
        result = chain(duplicate_of(bench, "skip"), group(steps_of(bench, "a", "b")))()
        assert isinstance(result, GroupResult)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert_become(bench, states.REVOKED, *result.results)
        assert ran(bench, "a") == ran(bench, "b") == 0

    def test_dropped_chord(self, bench: Bench) -> None:
        """Header and body of a chord that is dropped, and what follows it, are REVOKED."""
        bench.hold()
        header = group(steps_of(bench, "a", "b"))
        last = chain(duplicate_of(bench, "skip"), header, *steps_of(bench, "body", "after"))()
        assert isinstance(bench.error(last), TaskRevokedError)
        body = last.parent
        assert isinstance(body.parent, GroupResult)
        assert_become(bench, states.REVOKED, body, *body.parent.results)
        assert [0, 0, 0, 0] == [ran(bench, name) for name in ("a", "b", "body", "after")]

    def test_dropped_group_of_chains_and_chords(self, bench: Bench) -> None:
        """Nesting makes no difference: each id that the caller holds is REVOKED."""
        bench.hold()
        a, b, c, d, e, f = steps_of(bench, "a", "b", "c", "d", "e", "f")
        nested = group(chain(a, b), chord([c, d], e), f)
        result = chain(duplicate_of(bench, "skip"), nested)()
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        inner = [result.results[0].parent, *result.results[1].parent.results]
        assert_become(bench, states.REVOKED, *result.results, *inner)
        assert 0 == sum(ran(bench, name) for name in "abcdef")

    def test_link_and_errback(self, bench: Bench) -> None:
        """A callback of a skipped duplicate is not run and is REVOKED; no errback runs."""
        bench.hold()
        (callback,) = steps_of(bench, "callback")
        callback_result = callback.freeze()
        errback = bench.app.tasks["errback"].s(bench.other_tag("error"))
        duplicate = bench.job("skip").apply_async((bench.tag,), link=callback, link_error=errback)
        assert bench.get(duplicate) is None
        assert isinstance(bench.error(callback_result), TaskRevokedError)
        assert 0 == ran(bench, "callback")
        assert [] == bench.events("errback", bench.other_tag("error"))

    def test_link_to_a_chain(self, bench: Bench) -> None:
        """All of a chain that was linked to a skipped duplicate is REVOKED."""
        bench.hold()
        callback = chain(*steps_of(bench, "a", "b"))
        last = callback.freeze()
        bench.job("skip").apply_async((bench.tag,), link=callback)
        assert isinstance(bench.error(last), TaskRevokedError)
        assert_become(bench, states.REVOKED, last.parent)
        assert ran(bench, "a") == ran(bench, "b") == 0

    def test_callable_policy_decides_each_time(self, bench: Bench) -> None:
        """A callable gets the task and the holder, and its answer is the policy."""
        holder = bench.hold("callable")
        error = bench.error(bench.job("callable").delay(bench.tag))
        assert isinstance(error, DuplicateTask)
        assert holder.id == error.holder.task_id


# -- duplicate, retry ----------------------------------------------------------------------------


class TestRetry:
    def test_single(self, bench: Bench) -> None:
        """A postponed duplicate is in RETRY meanwhile, and then runs as its own run."""
        holder = bench.hold("retry")
        duplicate = bench.job("retry").delay(bench.tag, ["hold", "return"])
        bench.wait_for_state(duplicate, states.RETRY)
        assert_only_holder_ran(bench, holder)
        bench.let_go()
        assert "held" == bench.get(holder)
        assert "done" == bench.get(duplicate)
        first_end, second_start = bench.events("end")[0], bench.starts()[1]
        assert duplicate.id == second_start["id"]
        assert second_start["at"] >= first_end["at"]

    def test_chain(self, bench: Bench) -> None:
        """The rest of the chain runs after the postponed step, once."""
        bench.hold("retry")
        last = chain(duplicate_of(bench, "retry"), *steps_of(bench, "a", "b"))()
        bench.wait_for_state(last.parent.parent, states.RETRY)
        assert 0 == ran(bench, "a")
        bench.let_go()
        assert bench.get(last).startswith("then")
        assert (1, 1) == (ran(bench, "a"), ran(bench, "b"))

    def test_chord(self, bench: Bench) -> None:
        """A chord waits for its postponed member, and its body runs once."""
        bench.hold("retry")
        result = chord([duplicate_of(bench, "retry"), other(bench)])(collect(bench))
        bench.wait_for_state(result.parent.results[0], states.RETRY)
        assert [] == collected(bench)
        bench.let_go()
        assert ["done", "done"] == bench.get(result)
        assert [["done", "done"]] == collected(bench)

    def test_chain_inside_a_chord_header(self, bench: Bench) -> None:
        """A chain that is a chord's member goes on after its postponed step."""
        bench.hold("retry")
        member = chain(duplicate_of(bench, "retry"), *steps_of(bench, "a"))
        result = chord([member, other(bench)])(collect(bench))
        bench.wait_for_state(result.parent.results[0].parent, states.RETRY)
        bench.let_go()
        assert [f"then {bench.other_tag('a')}", "done"] == bench.get(result)

    def test_group(self, bench: Bench) -> None:
        """A group waits for its postponed member."""
        bench.hold("retry")
        result = group(duplicate_of(bench, "retry"), other(bench))()
        bench.wait_for_state(result.results[0], states.RETRY)
        bench.let_go()
        assert ["done", "done"] == result.get(timeout=20)

    def test_link(self, bench: Bench) -> None:
        """A callback runs after the postponed run, and not before; no errback runs."""
        bench.hold("retry")
        (callback,) = steps_of(bench, "callback")
        errback = bench.app.tasks["errback"].s(bench.other_tag("error"))
        duplicate = bench.job("retry").apply_async((bench.tag,), link=callback, link_error=errback)
        bench.wait_for_state(duplicate, states.RETRY)
        assert 0 == ran(bench, "callback")
        bench.let_go()
        assert "done" == bench.get(duplicate)
        bench.wait_for("then", bench.other_tag("callback"))
        assert [] == bench.events("errback", bench.other_tag("error"))

    def test_own_retries_are_untouched(self, bench: Bench) -> None:
        """However often a run was postponed, its own retries are all still there."""
        bench.hold("stingy")
        duplicate = bench.job("stingy").delay(bench.tag, ["hold", "retry", "return"])
        key = bench.key("stingy")
        until(lambda: len(bench.lock_signals(key, "duplicate")) >= 3, "postponed three times")
        bench.let_go()
        assert "done" == bench.get(duplicate)
        own = [start["retries"] for start in bench.starts() if start["id"] == duplicate.id]
        assert own == [0, 1]

    def test_many_postponed_runs_never_overlap(self, bench: Bench) -> None:
        """Ten copies that were postponed run one after the other, each of them."""
        bench.hold("retry")
        copies = [bench.job("retry").delay(bench.tag, "sleep", 0.05) for _ in range(10)]
        for copy in copies:
            bench.wait_for_state(copy, states.RETRY)
        bench.let_go()
        for copy in copies:
            assert "slept" == bench.get(copy)
        inside = 0
        for event in [event for event in bench.events() if event["what"] in ("start", "end")]:
            inside += 1 if event["what"] == "start" else -1
            assert inside in (0, 1)
        assert 11 == len(bench.starts())


class TestRetryPastMaxWait:
    def test_single(self, bench: Bench) -> None:
        """After max_wait the duplicate fails with DuplicateTask; its body did not run."""
        holder = bench.hold("impatient")
        duplicate = bench.job("impatient").delay(bench.tag)
        bench.wait_for_state(duplicate, states.RETRY)
        assert failed_with(bench, duplicate, DuplicateTask)
        assert_only_holder_ran(bench, holder)

    def test_chain(self, bench: Bench) -> None:
        """The rest of the chain is not run, and waiting for it ends with DuplicateTask."""
        bench.hold("impatient")
        last = chain(duplicate_of(bench, "impatient"), *steps_of(bench, "a"))()
        assert isinstance(bench.error(last), DuplicateTask)
        assert 0 == ran(bench, "a")

    def test_chord(self, bench: Bench) -> None:
        """The chord's body fails."""
        bench.hold("impatient")
        result = chord([duplicate_of(bench, "impatient"), other(bench)])(collect(bench))
        assert bench.chord_failed(result)
        assert [] == collected(bench)

    def test_link_and_errback(self, bench: Bench) -> None:
        """Errbacks run, callbacks do not."""
        bench.hold("impatient")
        (callback,) = steps_of(bench, "callback")
        errback = bench.app.tasks["errback"].s(bench.other_tag("error"))
        bench.job("impatient").apply_async((bench.tag,), link=callback, link_error=errback)
        error = bench.wait_for("errback", bench.other_tag("error"))
        assert "DuplicateTask" == error["error"]
        assert 0 == ran(bench, "callback")

    def test_eager(self, bench: Bench) -> None:
        """Nothing can be postponed in an eager run, so it fails with DuplicateTask."""
        bench.hold("retry")
        conf = {"broker_url": bench.app.conf.broker_url, "test_directory": "/nonexistent"}
        app = make_app({**conf, "singleton_lock_eager": True})
        eager = app.tasks["job.retry"].apply((bench.tag,))
        assert states.FAILURE == eager.state
        assert isinstance(eager.result, DuplicateTask)


# -- duplicate, raise ----------------------------------------------------------------------------


class TestRaise:
    @pytest.mark.parametrize("name", ["raising", "raise_object"])
    def test_single(self, bench: Bench, name: str) -> None:
        """The duplicate fails with DuplicateTask, which names key and holder."""
        holder = bench.hold(name)
        duplicate = bench.job(name).delay(bench.tag)
        error = bench.error(duplicate)
        assert isinstance(error, DuplicateTask)
        assert error.key == bench.key(name)
        assert holder.id == error.holder.task_id
        assert states.FAILURE == duplicate.state
        assert_only_holder_ran(bench, holder)

    def test_chain(self, bench: Bench) -> None:
        """The rest of the chain is not run, and waiting for it ends with DuplicateTask."""
        bench.hold("raising")
        last = chain(duplicate_of(bench, "raising"), *steps_of(bench, "a", "b"))()
        assert isinstance(bench.error(last), DuplicateTask)
        assert ran(bench, "a") == ran(bench, "b") == 0

    def test_chord(self, bench: Bench) -> None:
        """The chord's body fails, and does not run."""
        bench.hold("raising")
        result = chord([duplicate_of(bench, "raising"), other(bench)])(collect(bench))
        assert bench.chord_failed(result)
        assert isinstance(bench.error(result.parent.results[0]), DuplicateTask)
        assert [] == collected(bench)

    def test_chain_inside_a_chord_header(self, bench: Bench) -> None:
        """The chord's body fails here too."""
        bench.hold("raising")
        member = chain(duplicate_of(bench, "raising"), *steps_of(bench, "a"))
        result = chord([member, other(bench)])(collect(bench))
        assert bench.chord_failed(result)

    def test_group(self, bench: Bench) -> None:
        """Waiting for the group ends with DuplicateTask; other members are untouched."""
        bench.hold("raising")
        result = group(duplicate_of(bench, "raising"), other(bench))()
        with pytest.raises(DuplicateTask):
            result.get(timeout=20)
        assert "done" == bench.get(result.results[1])

    def test_link_and_errback(self, bench: Bench) -> None:
        """Errbacks run, callbacks do not."""
        bench.hold("raising")
        (callback,) = steps_of(bench, "callback")
        errback = bench.app.tasks["errback"].s(bench.other_tag("error"))
        duplicate = bench.job("raising").apply_async((bench.tag,), link=callback, link_error=errback)
        error = bench.wait_for("errback", bench.other_tag("error"))
        assert (duplicate.id, "DuplicateTask") == (error["id"], error["error"])
        assert 0 == ran(bench, "callback")


# -- the same task id, another attempt -----------------------------------------------------------


class TestSameTaskId:
    def held_twice(self, bench: Bench, work: Any) -> AsyncResult:
        """Publish work whose only step of the bench's tag holds, and deliver that step twice: again to the bench's worker."""
        with bench.captured_messages() as messages:
            result = work.apply_async()
        bench.wait_for("start")
        (message,) = [m for m in messages if m["headers"]["task"].startswith("job.")][:1]
        bench.redeliver({**message, "routing_key": bench.worker.worker_queue})
        task_id = message["headers"]["id"]
        until(lambda: len(bench.signals(task_id, "task_prerun")) >= 2, "a second attempt")
        bench.worker.wait_for_lines("INFO", task_id, bench.key_of(message))
        return result

    @pytest.mark.parametrize("name", ["skip", "raising", "retry"])
    def test_first_succeeds(self, bench: Bench, name: str) -> None:
        """The second attempt stores nothing while it waits, whatever the policy, and is dropped."""
        result = self.held_twice(bench, bench.job(name).si(bench.tag, ["hold", "return"]))
        seen = {result.state for _ in range(30)}
        assert seen == {states.STARTED}
        bench.let_go()
        assert "held" == bench.get(result)
        bench.settle(result.id)
        assert 1 == len(bench.starts())
        assert [] == bench.lock_signals(bench.key(name), "duplicate")
        assert states.SUCCESS == result.state
        assert "held" == result.result

    @pytest.mark.parametrize("other_arguments", [False, True])
    def test_id_used_again(self, bench: Bench, other_arguments: bool) -> None:
        """New work under the task id of work that has ended runs, though a second delivery of that once waited."""
        result = self.held_twice(bench, bench.job("skip").si(bench.tag, ["hold", "return"]))
        bench.let_go()
        assert "held" == bench.get(result)
        bench.settle(result.id)
        tag = bench.other_tag("again") if other_arguments else bench.tag
        bench.job("skip").apply_async((tag, "return"), task_id=result.id)
        bench.wait_for("start", tag, 1 if other_arguments else 2)

    def test_chain_first_succeeds(self, bench: Bench) -> None:
        """The chain's next step is published once."""
        first = bench.job("skip").si(bench.tag, ["hold", "return"])
        last = self.held_twice(bench, chain(first, *steps_of(bench, "a")))
        bench.let_go()
        assert bench.get(last).startswith("then")
        bench.settle(last.parent.id)
        assert 1 == ran(bench, "a")
        assert 1 == len(bench.starts())

    def test_chord_first_succeeds(self, bench: Bench) -> None:
        """The chord's body runs once, with the first attempt's result."""
        first = bench.job("skip").si(bench.tag, ["hold", "return"])
        result = self.held_twice(bench, chord([first, other(bench)], collect(bench)))
        bench.let_go()
        assert ["held", "done"] == bench.get(result)
        bench.settle(result.parent.results[0].id)
        assert [["held", "done"]] == collected(bench)
        assert 1 == len(bench.starts())

    def test_first_fails(self, bench: Bench) -> None:
        """The second attempt runs, and what it makes of it is the result."""
        result = self.held_twice(bench, bench.job("skip").si(bench.tag, ["hold_raise", "return"]))
        bench.let_go()
        bench.wait_for("start", count=2)
        bench.wait_for_state(result, states.SUCCESS)
        assert "done" == result.result
        bench.settle(result.id)
        assert 2 == len(bench.starts())

    def test_chain_first_fails(self, bench: Bench) -> None:
        """The second attempt runs, and the chain goes on, once."""
        first = bench.job("skip").si(bench.tag, ["hold_raise", "return"])
        last = self.held_twice(bench, chain(first, *steps_of(bench, "a")))
        bench.let_go()
        bench.wait_for("then", bench.other_tag("a"))
        bench.wait_for_state(last, states.SUCCESS)
        bench.settle(last.parent.id)
        assert 1 == ran(bench, "a")

    def test_chord_first_fails(self, bench: Bench) -> None:
        """The chord fails with the first attempt, as Celery has it; the second runs all the same, and is the member's result."""
        first = bench.job("skip").si(bench.tag, ["hold_raise", "return"])
        result = self.held_twice(bench, chord([first, other(bench)], collect(bench)))
        bench.let_go()
        bench.wait_for_state(result, states.FAILURE)
        bench.wait_for("start", count=2)
        bench.wait_for_state(result.parent.results[0], states.SUCCESS)
        assert [] == collected(bench)

    def test_first_dies(self, bench: Bench) -> None:
        """An attempt whose earlier one was killed runs; it is never taken for a duplicate."""
        result = self.held_twice(bench, bench.job("skip").si(bench.tag, ["hold", "return"]))
        bench.kill_body(bench.starts()[0])
        bench.wait_for("start", count=2)
        bench.wait_for_state(result, states.SUCCESS)
        assert "done" == result.result

    def test_chord_first_dies(self, bench: Bench) -> None:
        """A chord whose member was killed in its first process, and comes back, runs its body once, with a later result."""
        first = bench.job("comes_back").si(bench.tag, ["hold", "return"])
        result = self.held_twice(bench, chord([first, other(bench)], collect(bench)))
        # Logged once the first message has been given back, or, after a success of the second, dropped.
        lost = "WorkerLostError('Worker exited"
        seen = len(bench.worker.lines(lost))
        bench.kill_body(bench.starts()[0])
        assert ["done", "done"] == bench.get(result)
        bench.worker.wait_for_lines(lost, count=seen + 1)
        bench.settle(result.parent.results[0].id)
        assert [["done", "done"]] == collected(bench)
        assert [states.SUCCESS] * 2 == [one.state for one in result.parent.results]

    def test_chord_first_dies_with_its_worker(self, bench: Bench, fresh_worker: Callable[..., LocalWorkerNode]) -> None:
        """So does one whose member's first worker was killed as a whole, when another worker gets the message."""
        node = fresh_worker(WorkerSpec("threads", concurrency=1))
        first = bench.job("skip_short").si(bench.tag, ["hold", "return"]).set(queue=node.worker_queue)
        result = self.held_twice(bench, chord([first, other(bench)], collect(bench)))
        node.kill()
        assert ["done", "done"] == bench.get(result)
        bench.settle(result.parent.results[0].id)
        assert [["done", "done"]] == collected(bench)
        assert [node.hostname(), bench.worker.hostname()] == [start["node"] for start in bench.starts()]
