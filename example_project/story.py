"""Reads the runs and events of one demo from the ledger. Times are seconds since the demo's start."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from example_project import ledger

#: Seconds that may pass between two checks of a key of the killed worker.
LOOK = 0.25


@dataclass(frozen=True)
class Run:
    """One run of a body. `ended` is None while it runs, and if its worker was killed."""

    task: str
    work: str
    key: str
    task_id: str
    node: str
    fence: int
    started: float
    ended: float | None


@dataclass(frozen=True)
class Event:
    """A duplicate (`Skip`, `RetryLater`, `RunOnceMore` or `Raise`), a worker that became `ready`, or a `lost` lease."""

    at: float
    kind: str
    task: str
    key: str
    node: str
    holder: str


@dataclass
class Kill:
    """The kill of a whole worker, and when the keys of its bodies had disappeared."""

    node: str
    at: float
    gone: dict[str, float] = field(default_factory=dict)
    renewed: list[str] = field(default_factory=list)  #: keys that were renewed although their holder was dead
    late_write: str = ""  #: work of a dead body whose late write was not refused


@dataclass(frozen=True)
class Takeover:
    """A killed body, when its key disappeared, and the next run with its lock key."""

    cut: Run
    gone: float | None
    next: Run | None


@dataclass(frozen=True)
class Story:
    """All runs and events of one demo, for the report and the picture."""

    end: float
    nodes: tuple[str, ...]
    runs: list[Run]
    events: list[Event]
    kill: Kill | None

    def is_cut(self, run: Run) -> bool:
        """Return whether the kill ended this run."""
        return self.kill is not None and was_cut(run, self.kill)

    def until(self, run: Run) -> float:
        """Return when a run ended: its own end, or else the kill, or else the end of the demo."""
        if run.ended is not None:
            return run.ended
        return self.kill.at if self.kill and self.is_cut(run) else self.end

    def unfinished(self) -> list[Run]:
        """Return the runs that have not ended, without the killed ones."""
        return [run for run in self.runs if run.ended is None and not self.is_cut(run)]

    def overlaps(self) -> list[tuple[Run, Run]]:
        """Return the pairs of runs with one lock key that overlapped."""
        return [pair for runs in self._by_work() for pair in self._overlaps(runs)]

    def takeovers(self) -> list[Takeover]:
        """Return, for each lock key that the killed worker was running, how it was run again."""
        if self.kill is None:
            return []
        return [self._takeover(run, self.kill) for run in self.runs if self.is_cut(run)]

    def count(self, task: str, kind: str) -> int:
        """Return how many duplicates of a task ended in this way."""
        return sum(event.task == task and event.kind == kind for event in self.events)

    def _by_work(self) -> Iterator[list[Run]]:
        # Grouped by what the bodies did, not by the library's key: a wrong key would hide an overlap.
        ordered = sorted(self.runs, key=lambda run: (run.work, run.started))
        return (list(runs) for _, runs in groupby(ordered, key=lambda run: run.work))

    def _overlaps(self, runs: list[Run]) -> Iterator[tuple[Run, Run]]:
        for position, later in enumerate(runs):
            yield from ((earlier, later) for earlier in runs[:position] if later.started < self.until(earlier))

    def _takeover(self, cut: Run, kill: Kill) -> Takeover:
        gone = kill.gone.get(cut.key)
        later = [run for run in self.runs if run.work == cut.work and run.started > kill.at]
        following = min(later, key=lambda run: run.started, default=None)
        if gone and following and 0 < gone - following.started < LOOK:
            gone = following.started  # the check came late: the key had disappeared before that body started
        return Takeover(cut, gone, following)


def was_cut(run: Run, kill: Kill) -> bool:
    """Return whether a kill ended this run."""
    return run.ended is None and run.node == kill.node and run.started < kill.at


def runs(start: float) -> list[Run]:
    """Return all runs so far, oldest first. `start` is the monotonic time of the demo's start."""
    rows = ledger.read("SELECT * FROM runs ORDER BY started")
    return [
        Run(
            row["task"],
            row["work"],
            row["key"],
            row["task_id"],
            row["node"],
            row["fence"],
            row["started"] - start,
            None if row["ended"] is None else row["ended"] - start,
        )
        for row in rows
    ]


def events(start: float) -> list[Event]:
    """Return all events so far, oldest first."""
    rows = ledger.read("SELECT * FROM events ORDER BY at")
    return [Event(row["at"] - start, row["kind"], row["task"], row["key"], row["node"], row["holder"]) for row in rows]
