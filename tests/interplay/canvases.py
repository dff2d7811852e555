"""A duplicate in a canvas whose holder ends in some way: starts both, and checks how each task id of the canvas ends."""

from __future__ import annotations

import contextlib
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import chain, chord, group, states, uuid
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateTask
from celery_singleton_lock.policies import Policy
from tests.integration.environment import WorkerEnvironment
from tests.integration.recorder import Event
from tests.integration.tasks import Boom
from tests.servers import until

#: Seconds within which each task id ends: most of them are the rounds of a message in line.
DEADLINE = 90.0
#: Seconds after which a message in line looks again, and that the lease of a holder lives.
TTL, LONG = 4.0, 600.0

#: The own end of a holder whose worker is killed: nobody is left to store one, and without `acks_late` the message is gone.
NEVER = object()

#: How the body of a holder ends: what it does, and its own end: a value, the class of an error, or `NEVER`.
HOLDERS: dict[str, tuple[str, Any]] = {
    "succeeds": ("hold", "held"),
    "fails": ("hold_raise", Boom),
    "is killed": ("hold", WorkerLostError),
    "loses its lease": ("hold", "held"),
    "its worker is killed": ("hold", NEVER),
    "its worker is stopped": ("hold", "held"),
}

#: Ends that hit a whole worker, and which one of the cluster: its only bodies are these holders.
WORKERS = {"its worker is killed": 1, "its worker is stopped": 2}

#: What becomes of a duplicate -> its own value, or the class of its error.
OWN: dict[str, Any] = {"ran": "done", "skipped": None, "refused": DuplicateTask, "joined": "held", "failed": Boom}


class Case:
    """One policy, place and end of the holder. `ids` are the task ids that a caller of the canvas knows."""

    job = "skip"

    def __init__(self, env: WorkerEnvironment, policy: Policy, place: str, end: str) -> None:
        self.env, self.place, self.end = env, place, end
        self.queue = env.setup.worker_cluster[WORKERS.get(end, 0)].worker_queue
        self.tag = env.other_tag(f"{place}-{end}".replace(" ", "-"))
        self.options = {"lock_options": {"on_duplicate": policy, "lock_ttl": TTL}}
        self.holder_options = {"lock_options": {"on_duplicate": policy, "lock_ttl": LONG}}
        self.ids: dict[str, str] = {}
        self.others: list[AsyncResult] = []

    # -- what is sent ------------------------------------------------------------------------------

    def start_holder(self) -> None:
        """Publish the holder; its body waits."""
        acts = [HOLDERS[self.end][0], "return"]
        self.holder = self.env.job(self.job).apply_async((self.tag, acts), queue=self.queue, **self.holder_options)

    def holder_start(self) -> Event:
        """Wait until the holder's body runs."""
        return self.env.wait_for("start", self.tag, timeout=DEADLINE)

    def send_other(self) -> None:
        """Publish another duplicate, outside the canvas."""
        self.others.append(self.env.job(self.job).apply_async((self.tag,), **self.options))

    def send_canvas(self) -> None:
        """Publish the canvas in which the duplicate has this case's place."""
        duplicate = self._named("duplicate", self.env.job(self.job).si(self.tag).set(**self.options))
        if self.place == "single":
            duplicate.apply_async()
        elif self.place == "chain first":
            chain(duplicate, self._step("second"), self._step("third"))()
        elif self.place == "chain middle":
            chain(self._step("first"), duplicate, self._step("third"))()
        elif self.place == "group":
            group(duplicate, self._step("other"))()
        elif self.place == "chord header":
            body = self.env.app.tasks["collect"].s(self._tag("body"))
            chord([duplicate, self._step("other")])(self._named("body", body))
        elif self.place == "chord body":
            chord([self._step("other")])(duplicate)
        else:
            errback = self.env.app.tasks["errback"].s(self._tag("errback"))
            duplicate.apply_async(link=self._step("callback"), link_error=errback)

    def end_holder(self) -> None:
        """Let the holder's body end in this case's way, unless its worker does. One that lost its lease goes on."""
        if self.end == "is killed":
            self.env.kill_body(self.holder_start())
        elif self.end == "loses its lease":
            assert self.env.job(self.job).force_unlock(self.tag)  # type: ignore[attr-defined]
        elif self.end not in WORKERS:
            self.env.let_go(self.tag)

    def expire(self) -> None:
        """Let the holder's lease expire now: its worker does not renew it."""
        with contextlib.closing(self.env.store()) as store:
            assert store.pexpire(self.env.key(self.job, self.tag), 1)

    def wait_for_expiry(self, runs: bool) -> None:
        """Wait until the holder's lease has expired and all that waits has started, so that the holder cannot reacquire it.

        Args:
            runs: whether the duplicate is among them.
        """

        def is_over() -> bool:
            holder = self.env.job(self.job).lock_holder(self.tag)  # type: ignore[attr-defined]
            is_lost = holder is None or holder.task_id != self.holder.id
            return is_lost and len(self.env.starts(self.tag)) == 1 + runs + len(self.others)

        until(is_over, f"{self.tag}: the lease has expired", DEADLINE)

    def wait_for_decision(self, task_id: str) -> None:
        """Wait until the first delivery of a duplicate is over, and check that it has met the holder."""
        until(lambda: self.env.signals(task_id, "task_postrun"), f"{self.tag}: a decision", DEADLINE)
        met = self.env.lock_signals(self.env.key(self.job, self.tag), "duplicate")
        assert task_id in [event["task_id"] for event in met]

    def _step(self, name: str) -> Any:
        return self._named(name, self.env.app.tasks["then"].si(self._tag(name)))

    def _named(self, name: str, signature: Any) -> Any:
        self.ids[name] = uuid()
        return signature.set(task_id=self.ids[name])

    def _tag(self, name: str) -> str:
        return f"{self.tag}-{name}"

    # -- what is expected --------------------------------------------------------------------------

    def check(self, outcome: str, words: dict[str, str]) -> None:
        """Check how the duplicate and each other part of its canvas ends, then the holder, and that nothing is left."""
        for part, word in words.items():
            getattr(self, "_" + word.replace(" ", "_"))(part, OWN[outcome])
        for other in self.others:
            self._ends(other, "done")
        self.env.let_go(self.tag)
        if HOLDERS[self.end][1] is NEVER:
            assert not self.holder.ready()
        else:
            self._ends(self.holder, HOLDERS[self.end][1])
        ran = [self.ids["duplicate"]] if outcome == "ran" else []
        bodies = [self.holder.id, *ran, *(other.id for other in self.others)]
        assert bodies == [start["id"] for start in self.env.starts(self.tag)]
        if self.end in ("succeeds", "fails"):
            seen = [event["what"] for event in self.env.events(tag=self.tag)]
            assert ["start", "end"] * len(bodies) == [what for what in seen if what != "error"]
        until(lambda: not self.env.is_locked(self.job, self.tag), "the lock is free", DEADLINE)

    def _ends(self, result: AsyncResult, end: Any) -> None:
        """Check that a task ends with this value, or with an error of this class."""
        fails = isinstance(end, type)
        found = self.env.error(result, DEADLINE) if fails else self.env.get(result, DEADLINE)
        assert end == (type(found) if fails else found)
        assert (states.FAILURE if fails else states.SUCCESS) == result.state

    def _result(self, part: str) -> AsyncResult:
        return self.env.app.AsyncResult(self.ids[part])

    def _events(self, part: str, what: str) -> list[Event]:
        return self.env.events(what, self._tag(part))

    def _own_end(self, part: str, own: Any) -> None:
        self._ends(self._result(part), own)

    def _runs(self, part: str, own: Any) -> None:
        self._ends(self._result(part), f"then {self._tag(part)}")
        assert 1 == len(self._events(part, "then"))

    def _revoked(self, part: str, own: Any) -> None:
        assert isinstance(self.env.error(self._result(part), DEADLINE), TaskRevokedError)
        assert states.REVOKED == self._result(part).state
        self._never_runs(part, own)

    def _same_error(self, part: str, own: Any) -> None:
        self._ends(self._result(part), own)
        self._never_runs(part, own)

    def _collects(self, part: str, own: Any) -> None:
        members = [own, f"then {self._tag('other')}"]
        self._ends(self._result(part), members)
        assert [members] == [event["results"] for event in self._events(part, "collect")]

    def _chord_error(self, part: str, own: Any) -> None:
        self.env.wait_for_state(self._result(part), states.FAILURE, timeout=DEADLINE)
        assert isinstance(self._result(part).result, ChordError)
        self._never_runs(part, own)

    def _is_called(self, part: str, own: Any) -> None:
        called = until(lambda: self._events(part, "errback"), part, DEADLINE)
        assert [(self.ids["duplicate"], own.__name__)] == [(event["id"], event["error"]) for event in called]

    def _never_runs(self, part: str, own: Any) -> None:
        assert [] == self.env.events(tag=self._tag(part))
