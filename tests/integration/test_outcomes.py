"""How granted runs and duplicates end, alone and in chains, groups and chords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import celery
import pytest
from celery import Celery, chain, chord, group, states, uuid
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, GroupResult

from celery_singleton_lock import DuplicateTask
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import LocalWorkerNode, WorkerSpec
from tests.integration.tasks import make_app
from tests.servers import until


def steps_of(env: WorkerEnvironment, *suffixes: str) -> list[Any]:
    """Return plain steps, one for each suffix, which record that they ran."""
    return [env.app.tasks["then"].si(env.other_tag(suffix)) for suffix in suffixes]


def ran(env: WorkerEnvironment, suffix: str) -> int:
    """Return how often a plain step ran."""
    return len(env.events("then", env.other_tag(suffix)))


def duplicate_of(env: WorkerEnvironment, name: str) -> Any:
    """Return a signature of the env's work, whose lock another run holds."""
    return env.job(name).si(env.tag)


def other(env: WorkerEnvironment, name: str = "skip") -> Any:
    """Return a signature of other work."""
    return env.job(name).si(env.other_tag("other"))


def collect(env: WorkerEnvironment) -> Any:
    """Return a chord's body, which records what it was given."""
    return env.app.tasks["collect"].s(env.other_tag("collected"))


def collected(env: WorkerEnvironment) -> list[Any]:
    """Return the argument of the chord's body, for each of its runs."""
    return [event["results"] for event in env.events("collect", env.other_tag("collected"))]


def failed_with(env: WorkerEnvironment, result: AsyncResult, error: type[Exception]) -> bool:
    """Tell whether a result is a failure with an error of this class."""
    return isinstance(env.error(result), error) and result.state == states.FAILURE


def assert_become(env: WorkerEnvironment, state: str, *results: AsyncResult) -> None:
    """Check that all results reach this state; the last one may reach it first."""
    for result in results:
        env.wait_for_state(result, state)


def assert_only_holder_ran(env: WorkerEnvironment, holder: AsyncResult) -> None:
    """Check that no body but the holder's has started."""
    assert [holder.id] == [start["id"] for start in env.starts()]


# -- granted -------------------------------------------------------------------------------------


class TestGranted:
    def test_single(self, env: WorkerEnvironment) -> None:
        """A granted run ends as without the lock, and reports that it has the lock."""
        result = env.job("skip").delay(env.tag)
        assert "done" == env.get(result)
        assert states.SUCCESS == result.state
        (start,) = env.starts()
        assert start["held"] is True
        assert start["protected"] is True
        assert start["key"] == env.key()
        until(lambda: env.lock_signals(env.key(), "lock_released"), "lock_released")
        assert [event["what"] for event in env.lock_signals(env.key())] == [
            "lock_acquired",
            "lock_released",
        ]

    def test_failure(self, env: WorkerEnvironment) -> None:
        """A failure of the body has the state and errback as without the lock, and stops the chain."""
        errback = env.app.tasks["errback"].s(env.other_tag("error"))
        result = env.job("skip").apply_async((env.tag, "raise"), link_error=errback)
        assert "Boom" == type(env.error(result)).__name__
        assert "Boom" == env.wait_for("errback", env.other_tag("error"))["error"]

    def test_chain(self, env: WorkerEnvironment) -> None:
        """A chain continues after a granted step."""
        last = chain(env.job("skip").si(env.tag), *steps_of(env, "a"), other(env))()
        assert "done" == env.get(last)
        assert 1 == ran(env, "a")

    def test_chord(self, env: WorkerEnvironment) -> None:
        """A chord counts granted members, and its body may be locked too."""
        header = [env.job("skip").si(env.tag), other(env)]
        assert ["done", "done"] == env.get(chord(header)(collect(env)))
        assert "done" == env.get(chord(header)(other(env)))

    def test_countdown_longer_than_the_ttl(self, env: WorkerEnvironment) -> None:
        """A run with a countdown holds no lock before its start, however long that is; its body is protected as usual."""
        job, tag = env.job("skip_shortest"), env.other_tag("much later")
        much_later = job.apply_async((tag,), countdown=600)
        later = env.job("skip").apply_async((env.tag, ["hold", "return"]), countdown=1)
        env.worker.wait_for_lines(much_later.id, "received")
        assert not env.is_locked("skip_shortest", tag)
        assert "done" == env.get(job.delay(tag))
        env.revoke(much_later)
        start = env.wait_for("start")
        assert (later.id, True, True) == (start["id"], start["protected"], start["held"])
        assert env.get(env.job("skip").delay(env.tag)) is None
        env.let_go()
        assert "held" == env.get(later)
        assert 1 == len(env.starts())

    def test_group(self, env: WorkerEnvironment) -> None:
        """A group of different work runs as without the lock."""
        tags = [env.other_tag(str(number)) for number in range(6)]
        result = group(env.job("skip").si(tag) for tag in tags)()
        assert ["done"] * 6 == env.get(result)


# -- duplicate, skip -----------------------------------------------------------------------------


class TestSkip:
    @pytest.mark.parametrize(("name", "value"), [("skip", None), ("skip_value", "already")])
    def test_single(self, env: WorkerEnvironment, name: str, value: str | None) -> None:
        """A skipped duplicate is a SUCCESS with the policy's result; its body does not run."""
        holder = env.hold(name)
        duplicate = env.job(name).delay(env.tag)
        assert value == env.get(duplicate)
        assert states.SUCCESS == duplicate.state
        assert_only_holder_ran(env, holder)
        env.let_go()
        assert "held" == env.get(holder)

    def test_sent_by_name(self, env: WorkerEnvironment) -> None:
        """A publisher that only knows the task's name gets the same lock, however it spells the arguments."""
        with Celery("stranger", set_as_current=False) as stranger:
            for setting in ("broker_url", "result_backend", "task_default_queue"):
                stranger.conf[setting] = env.app.conf[setting]
            holder = stranger.send_task("job.skip_value", (env.tag, ["hold", "return"]))
            env.wait_for("start")
            duplicate = stranger.send_task("job.skip_value", kwargs={"tag": env.tag})
            assert "already" == env.get(duplicate)
            env.let_go()
            assert "held" == env.get(holder)
            assert "job.skip_value" not in stranger.tasks
            assert_only_holder_ran(env, holder)

    def test_chain_first(self, env: WorkerEnvironment) -> None:
        """The rest of the chain is not run and is REVOKED, so that waiting for it ends."""
        env.hold()
        last = chain(duplicate_of(env, "skip"), *steps_of(env, "a", "b"))()
        assert isinstance(env.error(last), TaskRevokedError)
        assert_become(env, states.REVOKED, last, last.parent)
        assert_become(env, states.SUCCESS, last.parent.parent)
        assert ran(env, "a") == ran(env, "b") == 0

    def test_chain_middle(self, env: WorkerEnvironment) -> None:
        """The steps before the duplicate run; those after it are REVOKED."""
        env.hold()
        before, after = steps_of(env, "before", "after")
        last = chain(before, duplicate_of(env, "skip"), after)()
        assert isinstance(env.error(last), TaskRevokedError)
        assert_become(env, states.SUCCESS, last.parent)
        assert (1, 0) == (ran(env, "before"), ran(env, "after"))

    def test_chain_last(self, env: WorkerEnvironment) -> None:
        """A duplicate at the end of a chain gives the chain the policy's result."""
        env.hold("skip_value")
        last = chain(*steps_of(env, "a"), duplicate_of(env, "skip_value"))()
        assert "already" == env.get(last)

    def test_group(self, env: WorkerEnvironment) -> None:
        """A member of a group counts as done with the policy's result."""
        env.hold("skip_value")
        result = group(duplicate_of(env, "skip_value"), other(env))()
        assert ["already", "done"] == env.get(result)

    def test_chord(self, env: WorkerEnvironment) -> None:
        """A member of a chord counts as done, and the body gets the policy's result."""
        env.hold("skip_value")
        result = chord([duplicate_of(env, "skip_value"), other(env)])(collect(env))
        assert ["already", "done"] == env.get(result)
        assert [["already", "done"]] == collected(env)

    def test_chord_of_duplicates_only(self, env: WorkerEnvironment) -> None:
        """A chord all of whose members are duplicates still runs its body, once."""
        env.hold()
        result = chord([duplicate_of(env, "skip")] * 3)(collect(env))
        assert [None, None, None] == env.get(result)
        assert [[None, None, None]] == collected(env)

    def test_chord_body(self, env: WorkerEnvironment) -> None:
        """A chord whose body is the duplicate ends with the policy's result."""
        env.hold("skip_value")
        result = chord([other(env)])(duplicate_of(env, "skip_value"))
        assert "already" == env.get(result)

    def test_chord_body_in_a_chain(self, env: WorkerEnvironment) -> None:
        """The steps after a chord whose body is the duplicate do not run and are REVOKED."""
        holder = env.hold("skip_value")
        steps = [duplicate_of(env, "skip_value"), *steps_of(env, "a", "b")]
        # Celery 5.5 and before has no link from the last result to the result of the body.
        body, a, b = (env.app.AsyncResult(step.set(task_id=uuid()).id) for step in steps)
        last = chain(chord([other(env)], steps[0]), *steps[1:])()
        assert b.id == last.id
        assert isinstance(env.error(last), TaskRevokedError)
        assert_become(env, states.REVOKED, a, b)
        assert "already" == env.get(body)
        assert ran(env, "a") == ran(env, "b") == 0
        assert_only_holder_ran(env, holder)

    def test_chain_inside_a_chord_header(self, env: WorkerEnvironment) -> None:
        """A skipped chain in a chord's header is REVOKED, and the chord's body fails as Celery defines; it never hangs."""
        env.hold()
        broken = chain(duplicate_of(env, "skip"), *steps_of(env, "a"))
        result = chord([broken, other(env)])(collect(env))
        assert env.chord_failed(result)
        assert_become(env, states.REVOKED, result.parent.results[0])
        assert 0 == ran(env, "a")
        assert [] == collected(env)

    def test_chain_inside_a_group(self, env: WorkerEnvironment) -> None:
        """Waiting for a group with a skipped chain ends, and its other members run as usual."""
        env.hold()
        broken = chain(duplicate_of(env, "skip"), *steps_of(env, "a"))
        result = group(broken, other(env))()
        with pytest.raises(TaskRevokedError):
            env.get(result)
        assert "done" == env.get(result.results[1])

    def test_dropped_group(self, env: WorkerEnvironment) -> None:
        """Each member of a dropped group is REVOKED."""
        env.hold()
        result = chain(duplicate_of(env, "skip"), group(steps_of(env, "a", "b")))()
        assert isinstance(result, GroupResult)
        with pytest.raises(TaskRevokedError):
            env.get(result)
        assert_become(env, states.REVOKED, *result.results)
        assert ran(env, "a") == ran(env, "b") == 0

    def test_dropped_chord(self, env: WorkerEnvironment) -> None:
        """The header and body of a dropped chord, and the steps after it, are REVOKED."""
        env.hold()
        header = group(steps_of(env, "a", "b"))
        last = chain(duplicate_of(env, "skip"), header, *steps_of(env, "body", "after"))()
        assert isinstance(env.error(last), TaskRevokedError)
        body = last.parent
        assert isinstance(body.parent, GroupResult)
        assert_become(env, states.REVOKED, body, *body.parent.results)
        assert [0, 0, 0, 0] == [ran(env, name) for name in ("a", "b", "body", "after")]

    def test_dropped_group_of_chains_and_chords(self, env: WorkerEnvironment) -> None:
        """Each id that the caller has of a dropped, nested group is REVOKED."""
        env.hold()
        a, b, c, d, e, f = steps_of(env, "a", "b", "c", "d", "e", "f")
        nested = group(chain(a, b), chord([c, d], e), f)
        result = chain(duplicate_of(env, "skip"), nested)()
        with pytest.raises(TaskRevokedError):
            env.get(result)
        inner = [result.results[0].parent, *result.results[1].parent.results]
        assert_become(env, states.REVOKED, *result.results, *inner)
        assert 0 == sum(ran(env, name) for name in "abcdef")

    def test_link_and_errback(self, env: WorkerEnvironment) -> None:
        """A callback of a skipped duplicate does not run and is REVOKED; no errback runs."""
        env.hold()
        (callback,) = steps_of(env, "callback")
        callback_result = callback.freeze()
        errback = env.app.tasks["errback"].s(env.other_tag("error"))
        duplicate = env.job("skip").apply_async((env.tag,), link=callback, link_error=errback)
        assert env.get(duplicate) is None
        assert isinstance(env.error(callback_result), TaskRevokedError)
        assert 0 == ran(env, "callback")
        assert [] == env.events("errback", env.other_tag("error"))

    def test_link_to_a_chain(self, env: WorkerEnvironment) -> None:
        """All steps of a chain that was linked to a skipped duplicate are REVOKED."""
        env.hold()
        callback = chain(*steps_of(env, "a", "b"))
        last = callback.freeze()
        env.job("skip").apply_async((env.tag,), link=callback)
        assert isinstance(env.error(last), TaskRevokedError)
        assert_become(env, states.REVOKED, last.parent)
        assert ran(env, "a") == ran(env, "b") == 0

    def test_callable_policy_decides_each_time(self, env: WorkerEnvironment) -> None:
        """A callable policy gets the task and the holder and returns the policy, again for each duplicate."""
        holder = env.hold("callable")
        error = env.error(env.job("callable").delay(env.tag))
        assert isinstance(error, DuplicateTask)
        assert holder.id == error.holder.task_id


# -- duplicate, retry ----------------------------------------------------------------------------


class TestRetry:
    def test_single(self, env: WorkerEnvironment) -> None:
        """A postponed duplicate is in RETRY meanwhile, and then runs as its own run."""
        holder = env.hold("retry")
        duplicate = env.job("retry").delay(env.tag, ["hold", "return"])
        env.wait_for_state(duplicate, states.RETRY)
        assert_only_holder_ran(env, holder)
        env.let_go()
        assert "held" == env.get(holder)
        assert "done" == env.get(duplicate)
        first_end, second_start = env.events("end")[0], env.starts()[1]
        assert duplicate.id == second_start["id"]
        assert second_start["at"] >= first_end["at"]

    def test_chain(self, env: WorkerEnvironment) -> None:
        """The rest of the chain runs after the postponed step, once."""
        env.hold("retry")
        last = chain(duplicate_of(env, "retry"), *steps_of(env, "a", "b"))()
        env.wait_for_state(last.parent.parent, states.RETRY)
        assert 0 == ran(env, "a")
        env.let_go()
        assert env.get(last).startswith("then")
        assert (1, 1) == (ran(env, "a"), ran(env, "b"))

    def test_chord(self, env: WorkerEnvironment) -> None:
        """A chord waits for its postponed member, and its body runs once."""
        env.hold("retry")
        result = chord([duplicate_of(env, "retry"), other(env)])(collect(env))
        env.wait_for_state(result.parent.results[0], states.RETRY)
        assert [] == collected(env)
        env.let_go()
        assert ["done", "done"] == env.get(result)
        assert [["done", "done"]] == collected(env)

    def test_chain_inside_a_chord_header(self, env: WorkerEnvironment) -> None:
        """A chain that is a chord's member continues after its postponed step."""
        env.hold("retry")
        member = chain(duplicate_of(env, "retry"), *steps_of(env, "a"))
        result = chord([member, other(env)])(collect(env))
        env.wait_for_state(result.parent.results[0].parent, states.RETRY)
        env.let_go()
        assert [f"then {env.other_tag('a')}", "done"] == env.get(result)

    def test_group(self, env: WorkerEnvironment) -> None:
        """A group waits for its postponed member."""
        env.hold("retry")
        result = group(duplicate_of(env, "retry"), other(env))()
        env.wait_for_state(result.results[0], states.RETRY)
        env.let_go()
        assert ["done", "done"] == env.get(result)

    def test_link(self, env: WorkerEnvironment) -> None:
        """A callback runs after the postponed run, not before; no errback runs."""
        env.hold("retry")
        (callback,) = steps_of(env, "callback")
        errback = env.app.tasks["errback"].s(env.other_tag("error"))
        duplicate = env.job("retry").apply_async((env.tag,), link=callback, link_error=errback)
        env.wait_for_state(duplicate, states.RETRY)
        assert 0 == ran(env, "callback")
        env.let_go()
        assert "done" == env.get(duplicate)
        env.wait_for("then", env.other_tag("callback"))
        assert [] == env.events("errback", env.other_tag("error"))

    def test_own_retries_are_untouched(self, env: WorkerEnvironment) -> None:
        """Postponements do not use up the task's own retries."""
        env.hold("stingy")
        duplicate = env.job("stingy").delay(env.tag, ["hold", "retry", "return"])
        key = env.key("stingy")
        until(lambda: len(env.lock_signals(key, "duplicate")) >= 3, "postponed three times")
        env.let_go()
        assert "done" == env.get(duplicate)
        own = [start["retries"] for start in env.starts() if start["id"] == duplicate.id]
        assert own == [0, 1]

    def test_many_postponed_runs_never_overlap(self, env: WorkerEnvironment) -> None:
        """Ten postponed duplicates all run, one after the other."""
        env.hold("retry")
        copies = [env.job("retry").delay(env.tag, "sleep", 0.05) for _ in range(10)]
        for copy in copies:
            env.wait_for_state(copy, states.RETRY)
        env.let_go()
        for copy in copies:
            assert "slept" == env.get(copy)
        inside = 0
        for event in [event for event in env.events() if event["what"] in ("start", "end")]:
            inside += 1 if event["what"] == "start" else -1
            assert inside in (0, 1)
        assert 11 == len(env.starts())


class TestRetryPastMaxWait:
    def test_single(self, env: WorkerEnvironment) -> None:
        """After max_wait the duplicate fails with DuplicateTask, and its body does not run."""
        holder = env.hold("impatient")
        duplicate = env.job("impatient").delay(env.tag)
        assert failed_with(env, duplicate, DuplicateTask)
        assert 2 < len(env.lock_signals(env.key("impatient"), "duplicate")), "it was postponed twice at least"
        assert_only_holder_ran(env, holder)

    def test_chain(self, env: WorkerEnvironment) -> None:
        """The rest of the chain is not run, and waiting for it ends with DuplicateTask."""
        env.hold("impatient")
        last = chain(duplicate_of(env, "impatient"), *steps_of(env, "a"))()
        assert isinstance(env.error(last), DuplicateTask)
        assert 0 == ran(env, "a")

    def test_chord(self, env: WorkerEnvironment) -> None:
        """The chord's body fails."""
        env.hold("impatient")
        result = chord([duplicate_of(env, "impatient"), other(env)])(collect(env))
        assert env.chord_failed(result)
        assert [] == collected(env)

    def test_link_and_errback(self, env: WorkerEnvironment) -> None:
        """Errbacks run, callbacks do not."""
        env.hold("impatient")
        (callback,) = steps_of(env, "callback")
        errback = env.app.tasks["errback"].s(env.other_tag("error"))
        env.job("impatient").apply_async((env.tag,), link=callback, link_error=errback)
        error = env.wait_for("errback", env.other_tag("error"))
        assert "DuplicateTask" == error["error"]
        assert 0 == ran(env, "callback")

    def test_eager(self, env: WorkerEnvironment) -> None:
        """An eager run cannot be postponed, so it fails with DuplicateTask."""
        env.hold("retry")
        conf = {"broker_url": env.app.conf.broker_url, "test_directory": "/nonexistent"}
        app = make_app({**conf, "singleton_lock_eager": True})
        eager = app.tasks["job.retry"].apply((env.tag,))
        assert states.FAILURE == eager.state
        assert isinstance(eager.result, DuplicateTask)


# -- duplicate, raise ----------------------------------------------------------------------------


class TestRaise:
    @pytest.mark.parametrize("name", ["raising", "raise_object"])
    def test_single(self, env: WorkerEnvironment, name: str) -> None:
        """The duplicate fails with DuplicateTask, which names the key and the holder."""
        holder = env.hold(name)
        duplicate = env.job(name).delay(env.tag)
        error = env.error(duplicate)
        assert isinstance(error, DuplicateTask)
        assert error.key == env.key(name)
        assert holder.id == error.holder.task_id
        assert states.FAILURE == duplicate.state
        assert_only_holder_ran(env, holder)

    def test_chain(self, env: WorkerEnvironment) -> None:
        """The rest of the chain is not run, and waiting for it ends with DuplicateTask."""
        env.hold("raising")
        last = chain(duplicate_of(env, "raising"), *steps_of(env, "a", "b"))()
        assert isinstance(env.error(last), DuplicateTask)
        assert ran(env, "a") == ran(env, "b") == 0

    def test_chord(self, env: WorkerEnvironment) -> None:
        """The chord's body fails and does not run."""
        env.hold("raising")
        result = chord([duplicate_of(env, "raising"), other(env)])(collect(env))
        assert env.chord_failed(result)
        assert isinstance(env.error(result.parent.results[0]), DuplicateTask)
        assert [] == collected(env)

    def test_chain_inside_a_chord_header(self, env: WorkerEnvironment) -> None:
        """The chord's body fails where a chain of its header has the duplicate."""
        env.hold("raising")
        member = chain(duplicate_of(env, "raising"), *steps_of(env, "a"))
        result = chord([member, other(env)])(collect(env))
        assert env.chord_failed(result)

    def test_group(self, env: WorkerEnvironment) -> None:
        """Waiting for the group ends with DuplicateTask, and its other members run as usual."""
        env.hold("raising")
        result = group(duplicate_of(env, "raising"), other(env))()
        with pytest.raises(DuplicateTask):
            env.get(result)
        assert "done" == env.get(result.results[1])

    def test_link_and_errback(self, env: WorkerEnvironment) -> None:
        """Errbacks run, callbacks do not."""
        env.hold("raising")
        (callback,) = steps_of(env, "callback")
        errback = env.app.tasks["errback"].s(env.other_tag("error"))
        duplicate = env.job("raising").apply_async((env.tag,), link=callback, link_error=errback)
        error = env.wait_for("errback", env.other_tag("error"))
        assert (duplicate.id, "DuplicateTask") == (error["id"], error["error"])
        assert 0 == ran(env, "callback")


# -- the same task id, another delivery ----------------------------------------------------------


class TestSameTaskId:
    def held_twice(self, env: WorkerEnvironment, work: Any) -> AsyncResult:
        """Publish work, and deliver its holding step, the one with the env's tag, a second time to the env's worker."""
        with env.captured_messages() as messages:
            result = work.apply_async()
        env.wait_for("start")
        (message,) = [m for m in messages if m["headers"]["task"].startswith("job.")][:1]
        env.redeliver({**message, "routing_key": env.worker.worker_queue})
        task_id = message["headers"]["id"]
        until(lambda: len(env.signals(task_id, "task_prerun")) >= 2, "a second attempt")
        env.worker.wait_for_lines("INFO", task_id, env.key_of(message))
        return result

    @pytest.mark.parametrize("name", ["skip", "raising", "retry"])
    def test_first_succeeds(self, env: WorkerEnvironment, name: str) -> None:
        """Under any policy a redelivery stores nothing while it waits, and is dropped after a success."""
        result = self.held_twice(env, env.job(name).si(env.tag, ["hold", "return"]))
        seen = {result.state for _ in range(30)}
        assert seen == {states.STARTED}
        env.let_go()
        assert "held" == env.get(result)
        env.finish(result.id)
        assert 1 == len(env.starts())
        assert [] == env.lock_signals(env.key(name), "duplicate")
        assert states.SUCCESS == result.state
        assert "held" == result.result

    @pytest.mark.parametrize("other_arguments", [False, True])
    def test_id_used_again(self, env: WorkerEnvironment, other_arguments: bool) -> None:
        """New work under the task id of ended work runs, even if a redelivery of that work waited before."""
        result = self.held_twice(env, env.job("skip").si(env.tag, ["hold", "return"]))
        env.let_go()
        assert "held" == env.get(result)
        env.finish(result.id)
        tag = env.other_tag("again") if other_arguments else env.tag
        env.job("skip").apply_async((tag, "return"), task_id=result.id)
        env.wait_for("start", tag, 1 if other_arguments else 2)

    def test_chain_first_succeeds(self, env: WorkerEnvironment) -> None:
        """The chain's next step is published once after the success of a redelivered step."""
        first = env.job("skip").si(env.tag, ["hold", "return"])
        last = self.held_twice(env, chain(first, *steps_of(env, "a")))
        env.let_go()
        assert env.get(last).startswith("then")
        env.finish(last.parent.id)
        assert 1 == ran(env, "a")
        assert 1 == len(env.starts())

    def test_chord_first_succeeds(self, env: WorkerEnvironment) -> None:
        """The chord's body runs once, with the result of the first delivery."""
        first = env.job("skip").si(env.tag, ["hold", "return"])
        result = self.held_twice(env, chord([first, other(env)], collect(env)))
        env.let_go()
        assert ["held", "done"] == env.get(result)
        env.finish(result.parent.results[0].id)
        assert [["held", "done"]] == collected(env)
        assert 1 == len(env.starts())

    def test_first_fails(self, env: WorkerEnvironment) -> None:
        """The redelivery runs after a failure, and its result is stored."""
        result = self.held_twice(env, env.job("skip").si(env.tag, ["hold_raise", "return"]))
        env.let_go()
        env.wait_for("start", count=2)
        env.wait_for_state(result, states.SUCCESS)
        assert "done" == result.result
        env.finish(result.id)
        assert 2 == len(env.starts())

    def test_chain_first_fails(self, env: WorkerEnvironment) -> None:
        """The redelivery runs after a failure, and the chain continues once."""
        first = env.job("skip").si(env.tag, ["hold_raise", "return"])
        last = self.held_twice(env, chain(first, *steps_of(env, "a")))
        env.let_go()
        env.wait_for("then", env.other_tag("a"))
        env.wait_for_state(last, states.SUCCESS)
        env.finish(last.parent.id)
        assert 1 == ran(env, "a")

    def test_chord_first_fails(self, env: WorkerEnvironment) -> None:
        """The chord fails with the first delivery, as Celery defines; the redelivery still runs, and its result is stored."""
        first = env.job("skip").si(env.tag, ["hold_raise", "return"])
        result = self.held_twice(env, chord([first, other(env)], collect(env)))
        env.let_go()
        env.wait_for_state(result, states.FAILURE)
        env.wait_for("start", count=2)
        env.wait_for_state(result.parent.results[0], states.SUCCESS)
        assert [] == collected(env)

    def test_first_dies(self, env: WorkerEnvironment) -> None:
        """A redelivery runs after the first delivery was killed, and is never treated as a duplicate."""
        result = self.held_twice(env, env.job("skip").si(env.tag, ["hold", "return"]))
        env.kill_body(env.starts()[0])
        env.wait_for("start", count=2)
        # Each time a new result object, as one keeps the FAILURE of the killed delivery.
        until(lambda: "done" == env.app.AsyncResult(result.id).result, "the redelivery has succeeded")
        assert states.SUCCESS == env.app.AsyncResult(result.id).state

    def test_chord_first_dies(self, env: WorkerEnvironment) -> None:
        """A chord whose member was killed and redelivered runs its body once, with a later result."""
        if celery.VERSION < (5, 7):
            pytest.skip(
                "this Celery requeues the message also when another delivery of it has succeeded, and so it runs again"
            )
        first = env.job("comes_back").si(env.tag, ["hold", "return"])
        result = self.held_twice(env, chord([first, other(env)], collect(env)))
        # Logged when the first message has been requeued or, after a success of the redelivery, dropped.
        lost = "WorkerLostError('Worker exited"
        seen = len(env.worker.lines(lost))
        env.kill_body(env.starts()[0])
        assert ["done", "done"] == env.get(result)
        env.worker.wait_for_lines(lost, count=seen + 1)
        env.finish(result.parent.results[0].id)
        assert [["done", "done"]] == collected(env)
        assert [states.SUCCESS] * 2 == [one.state for one in result.parent.results]

    def test_chord_first_dies_with_its_worker(
        self, env: WorkerEnvironment, fresh_worker: Callable[..., LocalWorkerNode]
    ) -> None:
        """A chord whose member's whole worker was killed runs its body once, after another worker got the message."""
        node = fresh_worker(WorkerSpec("threads", concurrency=1))
        first = env.job("skip_short").si(env.tag, ["hold", "return"])
        first.set(queue=node.worker_queue, lock_options={"lock_ttl": 6})
        result = self.held_twice(env, chord([first, other(env)], collect(env)))
        node.kill()
        assert ["done", "done"] == env.get(result)
        env.finish(result.parent.results[0].id)
        assert [["done", "done"]] == collected(env)
        assert [node.hostname(), env.worker.hostname()] == [start["node"] for start in env.starts()]
