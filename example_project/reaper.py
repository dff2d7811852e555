"""Kills one whole worker while it holds locks, shows them, watches their keys in Redis, and restarts the worker later."""

from collections.abc import Callable
from time import monotonic

from redis import Redis

from example_project import ledger, story, tasks
from example_project.constants import VISIBILITY_TIMEOUT
from example_project.processes import WORKERS, Fleet, node
from example_project.story import Kill, Run

#: How long the import must have run before the kill, in seconds: at least and at most.
YOUNGEST, OLDEST = 1.2, 3.8
#: Seconds to wait for a worker that runs an import and a sync at once.
PATIENCE = 6.0
#: Seconds without a new message before the kill. Kombu fetches a message from Redis first and records it as unacknowledged
#: afterwards. If the worker dies in between, the message is lost, and no plugin can notice.
QUIET = 0.3


class Reaper:
    """Does its next step at each tick, if one is due."""

    def __init__(self, fleet: Fleet, redis: Redis, start: float, at: float, say: Callable[[str], None]) -> None:
        """Take the demo's processes, Redis client and start time, and the seconds after which to choose a worker."""
        self._fleet, self._redis, self._start, self._at, self._say = fleet, redis, start, at, say
        self._left: dict[
            str, tuple[float, int]
        ] = {}  #: key -> time of the last check, and the milliseconds that it had left then
        self._restarted = False
        self._wrote_late = False
        self.kill: Kill | None = None

    def tick(self, elapsed: float) -> None:
        """Kill, or what follows: watch, show the locks, write late, restart."""
        if self.kill is None:
            if elapsed >= self._at:
                self._look_for_victim(elapsed)
            return
        if self._left:
            self._watch(self.kill)
        if shown := self._fleet.output_of("list"):
            self._say(f"$ celery -A example_project singleton list\n{shown}")
        if not self._wrote_late:
            self._write_late(self.kill)
        if not self._restarted and elapsed > self.kill.at + VISIBILITY_TIMEOUT + 1:
            self._restarted = True  # late, so that the picture shows how other workers take over
            self._fleet.start_worker(_worker(self.kill.node))

    def settled(self) -> bool:
        """Return whether the keys of the killed bodies have expired, and each of their lock keys has run again."""
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
                has_company = any(other.node == run.node and other.task == "sync_account" for other in running)
                if (has_company or elapsed > self._at + PATIENCE) and self._all_wait_for_messages():
                    self._strike(run)
                    return

    def _last_message(self) -> float:
        """Return when a payment was last sent or postponed."""
        times = ledger.read("SELECT asked AS at FROM payments UNION SELECT at FROM events WHERE kind = 'RetryLater'")
        return max((row["at"] - self._start for row in times), default=0.0)

    def _all_wait_for_messages(self) -> bool:
        """Return whether each worker waits for its next message, and so has recorded all earlier ones.

        A worker at its prefetch limit does not read the reply to its last request for seconds. A message in that reply
        is in no key of Redis. On a server that others use, their workers are counted too.
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
        self._fleet.start_command("list", "singleton", "list")
        self._redis.ping()  # after this reply the server has closed the dead connections, and sends them no message
        for other in cut:
            if (
                other.task == "sync_account"
            ):  # another task wants the account, and has to wait for the dead worker's lock
                tasks.pay(other.work.partition(" ")[2], 100)

    def _write_late(self, kill: Kill) -> None:
        """Write as a dead body would whose write was still on its way, once the account was written under a later lease."""
        runs = story.runs(self._start)
        for cut in (run for run in runs if run.task == "sync_account" and story.was_cut(run, kill)):
            account = cut.work.partition(" ")[2]
            later = max((run.fence for run in runs if run.work == cut.work and run.ended), default=0)
            payment = ledger.number("SELECT min(id) FROM payments WHERE account = ? AND NOT posted", account)
            if later > cut.fence and payment:
                try:
                    ledger.post_payment(payment, account, 0, cut.fence)  # does nothing if a worker has just posted it
                except ledger.StaleFence:
                    self._wrote_late = True
                    self._say(
                        f"{cut.work}: a late write of {cut.node} with fence {cut.fence} is refused: {later} has written"
                    )
                else:
                    if ledger.number("SELECT fence FROM balances WHERE account = ?", account) == cut.fence:
                        kill.late_write = cut.work
                return

    def _watch(self, kill: Kill) -> None:
        for key, (asked, before) in list(self._left.items()):
            asked_now, left = self._look_at(key)
            if 0 <= left <= before:
                self._left[key] = asked_now, left
                continue
            now, expiry = monotonic() - self._start, asked + before / 1000
            if left > before and now < expiry:  # a later key may belong to a new holder
                kill.renewed.append(key)
            kill.gone[key] = min(now, expiry)
            del self._left[key]

    def _look_at(self, key: str) -> tuple[float, int]:
        return monotonic() - self._start, int(self._redis.pttl(key))


def _worker(name: str) -> str:
    return next(worker for worker in WORKERS if node(worker) == name)
