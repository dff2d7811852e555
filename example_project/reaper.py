"""Kills one whole worker while it holds locks, watches their keys in Redis, and brings the worker back later."""

from collections.abc import Callable
from time import monotonic

from redis import Redis

from example_project import ledger, story, tasks
from example_project.constants import VISIBILITY_TIMEOUT
from example_project.processes import WORKERS, Fleet, node
from example_project.story import Kill, Run

#: Seconds for which the killed body has run, at least and at most: the lock is held, and would be for a while.
YOUNGEST, OLDEST = 1.2, 3.8
#: Seconds to hold out for a worker that is busy with a sync too.
PATIENCE = 6.0
#: Seconds without a new message before the kill. Kombu takes a message from Redis and only then notes it as not yet acknowledged:
#: of a worker killed in between, the message is lost, and no plugin can know.
QUIET = 0.3


class Reaper:
    """Does its next step, when it is due, at each tick."""

    def __init__(self, fleet: Fleet, redis: Redis, start: float, at: float, say: Callable[[str], None]) -> None:
        """Take the demo's processes, store and start, and when to look for a victim (seconds from the start)."""
        self._fleet, self._redis, self._start, self._at, self._say = fleet, redis, start, at, say
        self._left: dict[str, tuple[float, int]] = {}  #: key -> when it was looked at, and how many milliseconds it had
        self._restarted = False
        self.kill: Kill | None = None

    def tick(self, elapsed: float) -> None:
        """Kill, watch or restart."""
        if self.kill is None:
            if elapsed >= self._at:
                self._look_for_victim(elapsed)
        elif self._left:
            self._watch(self.kill)
        if self.kill and not self._restarted and elapsed > self.kill.at + VISIBILITY_TIMEOUT + 1:
            self._restarted = True  # as any supervisor would, only later, so that the picture shows the takeover
            self._fleet.start_worker(_worker(self.kill.node))

    def settled(self) -> bool:
        """Return whether the keys of the killed bodies are gone, and each of their signatures has run again."""
        if self.kill is None:
            return False
        runs = story.runs(self._start)
        cut = {run.work for run in runs if story.was_cut(run, self.kill)}
        return not self._left and cut <= {run.work for run in runs if run.started > self.kill.at}

    def _look_for_victim(self, elapsed: float) -> None:
        if elapsed - self._last_message() < QUIET:
            return
        running = [run for run in story.runs(self._start) if run.ended is None]
        for run in running:
            if run.task == "import_rates" and YOUNGEST < elapsed - run.started < OLDEST:
                company = [other for other in running if other.node == run.node]
                if (len(company) > 1 or elapsed > self._at + PATIENCE) and self._all_wait_for_messages():
                    self._strike(run)
                    return

    def _last_message(self) -> float:
        """Return when a payment was last asked for, or put off for later."""
        times = ledger.read("SELECT asked AS at FROM payments UNION SELECT at FROM events WHERE kind = 'RetryLater'")
        return max((row["at"] - self._start for row in times), default=0.0)

    def _all_wait_for_messages(self) -> bool:
        """Return whether each worker asks Redis for the next message: it has noted each that it took before.

        A worker that has as many messages as it may leaves the answer to its last question unread, for seconds; a
        message in it is in no key of Redis. On a server that others use, their workers are counted too.
        """
        blocked = [client for client in self._redis.client_list() if "b" in client["flags"]]
        return sum(client["cmd"] == "brpop" for client in blocked) >= len(WORKERS)

    def _strike(self, run: Run) -> None:
        at = self._fleet.kill(_worker(run.node)) - self._start
        self.kill = Kill(run.node, at)
        cut = [other for other in story.runs(self._start) if story.was_cut(other, self.kill)]
        self._left = {other.key: self._look_at(other.key) for other in cut}
        works = ", ".join(other.work for other in cut)
        self._say(f"{at:5.1f} s  SIGKILL to all of {run.node}, which holds: {works}")
        self._redis.ping()  # from here on the server knows that the dead are gone, and gives them no message
        for other in cut:
            if other.task == "sync_account":  # somebody else wants the account too, and has to wait for the dead
                tasks.pay(other.work.partition(" ")[2], 100)

    def _watch(self, kill: Kill) -> None:
        for key, (asked, before) in list(self._left.items()):
            asked_now, left = self._look_at(key)
            if 0 <= left <= before:
                self._left[key] = asked_now, left
                continue
            now, expiry = monotonic() - self._start, asked + before / 1000
            if left > before and now < expiry:  # later it may be that of a new holder
                kill.renewed.append(key)
            kill.gone[key] = min(now, expiry)
            del self._left[key]

    def _look_at(self, key: str) -> tuple[float, int]:
        return monotonic() - self._start, int(self._redis.pttl(key))


def _worker(name: str) -> str:
    return next(worker for worker in WORKERS if node(worker) == name)
