"""What the rows do with each feature: bodies that hold its lock in one worker, and messages that meet them in another."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from celery.exceptions import Retry, WorkerLostError
from celery.result import AsyncResult

from tests.faults.harness import Worker, WorkerEnvironment
from tests.faults.ledger import Event
from tests.faults.probes import digests
from tests.faults.tasks import SEVERAL

#: Queue of the worker that no fault hits.
OTHER = "two"
#: Queue that nobody consumes before the fault is over.
LATER = "three"


class Feature(ABC):
    """One feature in one row.

    Args:
        env: of the row.
        act: of the bodies that hold the lock.
        options: of their messages.
    """

    name: str
    holders = 1

    def __init__(self, env: WorkerEnvironment, act: str, **options: object) -> None:
        self.env = env
        self.act = act
        self.options = options
        self.bodies: list[Event] = []
        self.met: list[AsyncResult] = []

    def hold(self) -> None:
        """Have as many bodies hold the lock as its limit allows."""
        for number in range(self.holders):
            self.env.send(self.name, self.name, [self.act], **self.options)
            self.bodies.append(self.env.body(self.name, number + 1))

    @abstractmethod
    def meet(self) -> None:
        """Send messages that meet the held lock, and wait until they have met it."""

    def next_start(self) -> float:
        """Wait until one of these messages starts, and return when it does."""
        return float(self.env.body(self.name, self.holders + 1)["at"])

    def waits(self) -> bool:
        """Tell whether no message has started beside the holders."""
        return len(self.env.ledger.events("start", tag=self.name)) == self.holders

    @abstractmethod
    def check(self) -> None:
        """Check what became of these messages, once the holders have ended."""

    def had(self, *kinds: str) -> bool:
        """Tell whether a fault of one of these kinds has happened."""
        return any(fault.kind in kinds for fault in self.env.schedule)

    def deliver_later(self) -> None:
        """Have the worker that no fault hits take the messages that nobody has consumed."""
        nodes = [self.env.workers[-1].node]
        assert self.env.app.control.add_consumer(LATER, destination=nodes, reply=True, timeout=10)

    def ran(self) -> list[str]:
        """Return the task ids of the messages that ran after the holders, in order."""
        return [event["task_id"] for event in self.env.ledger.events("start", tag=self.name)][self.holders :]


class InLine(Feature):
    """All messages that wait run, in order; where the store was away for long, lost its data or a reply, in that of their copies.

    Each of them runs once, unless the store lost its data.
    """

    name = "wait"

    def meet(self) -> None:
        self.met = self.env.line_up(self.name, self.name, 3, expect="once in peace", queue=OTHER)

    def check(self) -> None:
        assert ["slept"] * 3 == [result.get(timeout=30) for result in self.met]
        if not self.had("empty"):
            assert len(set(self.ran())) == len(self.ran()), "ran again"
        if not self.had("empty", "outage", "reply"):
            assert [result.id for result in self.met] == self.ran()


class OnceMore(Feature):
    """The first message that waits runs, and others are skipped."""

    name = "once-more"

    def meet(self) -> None:
        self.met = self.env.line_up(self.name, self.name, 1, expect="once in peace", queue=OTHER)
        for _ in range(2):
            skipped = self.env.send(self.name, self.name, expect="none", queue=OTHER)
            assert skipped.get(timeout=10) is None

    def check(self) -> None:
        assert "slept" == self.met[0].get(timeout=30)


class Latest(Feature):
    """The last message runs, and those whose place it took are skipped; after a loss of data it may be one of them."""

    name = "latest"

    def meet(self) -> None:
        self.met = self.env.line_up(self.name, self.name, 3, queue=OTHER)

    def check(self) -> None:
        results = [result.get(timeout=30) for result in self.met]
        if self.had("empty"):
            assert "slept" in results
        else:
            assert [None, None, "slept"] == results
            assert [self.met[-1].id] == self.ran()


class Newest(Feature):
    """The last message runs once the holder has ended, which is asked to stop; the others are skipped."""

    name = "replace"

    def meet(self) -> None:
        self.met = self.env.line_up(self.name, self.name, 2, expect="run after", queue=OTHER)
        self.env.wait("stopped", run=self.bodies[0]["run"])

    def check(self) -> None:
        results = [result.get(timeout=30) for result in self.met]
        assert results[-1] == "slept"
        if not self.had("empty", "outage"):
            assert [None, "slept"] == results
            assert [self.met[-1].id] == self.ran()


class Joined(Feature):
    """Messages end as the holder ends; one of them runs if it has vanished, or after its lease has expired."""

    name = "join"

    def meet(self) -> None:
        self.met = [self.env.send(self.name, self.name, queue=OTHER) for _ in range(2)]
        for result in self.met:
            self.env.wait("duplicate", task_id=result.id)

    def next_start(self) -> float:
        return 0.0

    def check(self) -> None:
        holder = AsyncResult(self.bodies[0]["task_id"], app=self.env.app)
        ends = {self._end(result) for result in self.met}
        if self.had("stop", "outage", "empty"):
            assert ends <= {"held", "slept"}
        elif not holder.ready() or isinstance(holder.result, (WorkerLostError, Retry)):
            assert ends == {"slept"}
        else:
            assert ends == {self._end(holder)}

    def _end(self, result: AsyncResult) -> str:
        """Return the value of a result, or the name of its error."""
        try:
            return str(result.get(timeout=30))
        except Exception as error:
            return type(error).__name__


class Several(Feature):
    """A message waits until one of several holders has ended."""

    name = "limit"
    holders = SEVERAL

    def meet(self) -> None:
        self.met = [self.env.send(self.name, self.name, expect="once in peace", queue=OTHER) for _ in range(2)]
        for result in self.met:
            self.env.wait("duplicate", task_id=result.id)

    def check(self) -> None:
        assert ["slept", "slept"] == [result.get(timeout=30) for result in self.met]


class SeveralInLine(Feature):
    """Messages wait in line for one of several slots; the checker knows their order."""

    name = "limit-wait"
    holders = SEVERAL

    def meet(self) -> None:
        self.met = self.env.line_up(self.name, self.name, SEVERAL + 1, expect="once in peace", queue=OTHER)

    def check(self) -> None:
        assert ["slept"] * (SEVERAL + 1) == [result.get(timeout=30) for result in self.met]


class AtPublish(Feature):
    """A call is not published while another with its lock key runs, or waits in a queue, whose lock it has."""

    name = "publish"
    waiting = "publish-waiting"

    def meet(self) -> None:
        (body,) = self.bodies
        assert body["task_id"] == self.env.send(self.name, self.name, queue=OTHER).id
        self.met = [self.env.send(self.name, self.waiting, expect="decided in peace", queue=LATER)]
        assert self.met[0].id == self.env.send(self.name, self.waiting, queue=OTHER).id

    def next_start(self) -> float:
        return 0.0

    def check(self) -> None:
        again = self.env.send(self.name, self.waiting, expect="any", queue=OTHER)
        self.deliver_later()
        if self.had("empty"):  # either has the lock
            assert "slept" in [result.get(timeout=30) for result in (*self.met, again)]
            return
        assert self.met[0].id == again.id
        assert "slept" == again.get(timeout=30)
        after = self.env.send(self.name, self.name, expect="once in peace", queue=OTHER)
        assert "slept" == after.get(timeout=30)
        assert after.id != self.bodies[0]["task_id"]


class InLineAtPublish(InLine):
    """The holder has reserved its lock; what meets it is sent without a reservation."""

    name = "publish-wait"


class OnceMoreAtPublish(OnceMore):
    """The holder has reserved its lock; what meets it is sent without a reservation."""

    name = "publish-once-more"


class JoinedAtPublish(Joined):
    """The holder has reserved its lock; what meets it is sent without a reservation."""

    name = "publish-join"


class NewestAtPublish(Newest):
    """As `Newest`; a message with a reservation is skipped as well, whenever it comes, once a newer one has taken its place."""

    name = "publish-replace"
    reserved = "publish-replace-reserved"

    def meet(self) -> None:
        super().meet()
        self.old = self.env.send(self.name, self.reserved, queue=LATER)
        newer = self.env.send(self.name, self.reserved, expect="once in peace", queue=OTHER)
        assert "slept" == newer.get(timeout=30)

    def check(self) -> None:
        super().check()
        self.deliver_later()
        end = self.old.get(timeout=30)
        assert end is None or self.had("empty")


FEATURES: tuple[type[Feature], ...] = (
    InLine, OnceMore, Latest, Newest, Joined, Several, SeveralInLine,
    AtPublish, InLineAtPublish, OnceMoreAtPublish, JoinedAtPublish, NewestAtPublish,
)  # fmt: skip


class Row:
    """All features side by side: a worker whose bodies hold all locks, and one that takes what meets them."""

    def __init__(self, env: WorkerEnvironment, victim: Worker, features: list[Feature]) -> None:
        self.env = env
        self.victim = victim
        self.features = features

    @property
    def bodies(self) -> list[Event]:
        """The bodies that hold the locks."""
        return [body for feature in self.features for body in feature.bodies]

    def waits(self, seconds: float) -> None:
        """Check for some seconds that nothing starts beside the holders."""
        until_then = self.env.last
        for _ in range(4):
            until_then(seconds / 4)
            assert [] == [feature.name for feature in self.features if not feature.waits()], "started beside its holder"

    def next_starts(self, since: float) -> float:
        """Wait until a message of each feature has started, and return how long the last of them took."""
        return max(feature.next_start() for feature in self.features) - since

    def next_after_ends(self) -> float:
        """Wait until a message of each feature has started, and return how long that took after the end of its first holder."""
        ends = [min(self.env.end(body)["at"] for body in feature.bodies) for feature in self.features]
        return max(feature.next_start() - end for feature, end in zip(self.features, ends, strict=True))

    def go(self) -> None:
        """Let all holders end."""
        for feature in self.features:
            self.env.go(feature.name)


@contextlib.contextmanager
def holding(
    ttl: float, pool: str = "prefork", act: str = "hold", lost_replies: int = 0, **options: object
) -> Iterator[Row]:
    """Yield a row whose locks are held and met; after the block the holders end, and all is checked.

    Args:
        ttl: ``lock_ttl`` in seconds.
        pool: of the holders' worker.
        act: of the holders.
        lost_replies: how many of the first acquires of what meets them get no reply; if any, there is a proxy.
        options: of the holders' messages.
    """
    with WorkerEnvironment(ttl=ttl, proxied=lost_replies > 0, singleton_lock_queue_ttl=90.0) as env:
        victim = env.start(pool, sum(feature.holders for feature in FEATURES))
        env.start("threads", 8, options=("-Q", OTHER)).ready(env.app)
        victim.ready(env.app)
        row = Row(env, victim, [feature(env, act, **options) for feature in FEATURES])
        for feature in row.features:
            feature.hold()
        if lost_replies:
            env.know_scripts()  # so that the lost reply is not NOSCRIPT
            env.proxy.drop_reply(digests("acquire"), times=lost_replies)
        for feature in row.features:
            feature.meet()
        yield row
        row.go()
        for body in row.bodies:
            env.end(body)
        for feature in row.features:
            feature.check()
        env.finish()


__all__ = ["FEATURES", "AtPublish", "Feature", "Newest", "Row", "holding"]
