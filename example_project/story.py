"""What happened in one demo, read back from the ledger; times are seconds since the demo's start."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from example_project import ledger

#: Seconds that may pass between two looks at a key of the killed worker.
LOOK = 0.25


@dataclass(frozen=True)
class Run:
    """One execution of a body; `ended` is None where nobody was left to write it down."""

    task: str
    work: str
    key: str
    task_id: str
    node: str
    started: float
    ended: float | None


@dataclass(frozen=True)
class Event:
    """A duplicate and its fate (`Skip`, `RetryLater`, `Raise`), or a worker that became `ready`, or a `lost` lease."""

    at: float
    kind: str
    task: str
    key: str
    node: str
    holder: str


@dataclass
class Kill:
    """A whole worker killed, and when the keys of the bodies it ran were seen gone."""

    node: str
    at: float
    gone: dict[str, float] = field(default_factory=dict)
    renewed: list[str] = field(default_factory=list)  #: keys whose expiry was put off by no living holder


@dataclass(frozen=True)
class Takeover:
    """How a signature fared whose body was cut short."""

    cut: Run
    gone: float | None
    next: Run | None


@dataclass(frozen=True)
class Story:
    """Everything that is reported and drawn."""

    end: float
    nodes: tuple[str, ...]
    runs: list[Run]
    events: list[Event]
    kill: Kill | None

    def is_cut(self, run: Run) -> bool:
        """Return whether the run was under way in the killed worker."""
        return self.kill is not None and was_cut(run, self.kill)

    def until(self, run: Run) -> float:
        """Return when a run was over: its end, else the kill, else the end of the demo."""
        if run.ended is not None:
            return run.ended
        return self.kill.at if self.kill and self.is_cut(run) else self.end

    def unfinished(self) -> list[Run]:
        """Return the runs that are under way, those cut short by the kill apart."""
        return [run for run in self.runs if run.ended is None and not self.is_cut(run)]

    def overlaps(self) -> list[tuple[Run, Run]]:
        """Return the pairs of runs of one signature that were under way at the same time."""
        return [pair for runs in self._by_work() for pair in self._overlaps(runs)]

    def takeovers(self) -> list[Takeover]:
        """Return what became of each signature that the killed worker was busy with."""
        if self.kill is None:
            return []
        return [self._takeover(run, self.kill) for run in self.runs if self.is_cut(run)]

    def count(self, task: str, kind: str) -> int:
        """Return how often duplicates of a task met this fate."""
        return sum(event.task == task and event.kind == kind for event in self.events)

    def _by_work(self) -> Iterator[list[Run]]:
        # By what the bodies did, not by the library's key: a wrong key would hide an overlap.
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
            gone = following.started  # it was seen at the next look, and had gone before that body started
        return Takeover(cut, gone, following)


def was_cut(run: Run, kill: Kill) -> bool:
    """Return whether a kill ended this run."""
    return run.ended is None and run.node == kill.node and run.started < kill.at


def runs(start: float) -> list[Run]:
    """Return all runs so far, oldest first; `start` is the monotonic time that counts as 0."""
    rows = ledger.read("SELECT * FROM runs ORDER BY started")
    return [
        Run(
            row["task"],
            row["work"],
            row["key"],
            row["task_id"],
            row["node"],
            row["started"] - start,
            None if row["ended"] is None else row["ended"] - start,
        )
        for row in rows
    ]


def events(start: float) -> list[Event]:
    """Return all events so far, oldest first."""
    rows = ledger.read("SELECT * FROM events ORDER BY at")
    return [Event(row["at"] - start, row["kind"], row["task"], row["key"], row["node"], row["holder"]) for row in rows]
