"""(b) The whole path of a task that does nothing: publish and drain, by a real worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.cycle import RAW
from benchmarks.cycle import candidates as cycles
from benchmarks.report import Bars, Cell, Section, Table, Target
from benchmarks.rounds import Spread, interval, median_of, shuffled
from benchmarks.stage import Stage
from benchmarks.tasks import BARE, LEAST, ONCE, OURS, SINGLETON
from benchmarks.worker import BODIES, BROKER, MAIN, PUBLISHER, STORE, Drained, Worker

HOW = (
    "A batch is published while the worker is kept busy, then drained: seconds of both for each task. One place "
    "in the pool, results ignored, log level WARNING, locks in a store of their own. Added: less the bare "
    "task's of the same round. The peers take their lock when they publish, this library when the task runs. "
    "The bare task whose body sends the same two commands over a raw socket is the floor: between two "
    "tasks processes sleep and caches cool, so that they cost more than in a loop. The least Python is "
    "another bare task, whose body makes these commands anew for each task, as a prefork child's with keys and a "
    "token of its own, sends them under a deadline and notes what it holds, and does nothing else. A third one "
    "sends the two commands as they are over a connection of redis-py. "
    "Ratios are of medians, with the 95 % interval of a bootstrap by blocks of rounds. CPU by process: the bare "
    "task's, then what the others add to it."
)
PEERS = (ONCE, SINGLETON)
PROCESSES = {"solo": (PUBLISHER, BODIES, STORE, BROKER), "prefork": (PUBLISHER, MAIN, BODIES, STORE, BROKER)}
POOLS = tuple(PROCESSES)
#: CPU that a run may add, divided by what the best peer adds.
OF_BEST_PEER = {"solo": 1.0, "prefork": 1.1}
#: How many rounds each worker takes; in prefork what is added is little beside what runs differ by.
ROUNDS = {"solo": 60, "prefork": 250}


class Batches:
    """Batches of each kind, round by round, and the raw-socket cycle beside them."""

    def __init__(self, stage: Stage, pool: str) -> None:
        tasks = {**stage.tasks, **stage.floors}
        self.found: dict[str, list[Drained]] = {kind: [] for kind in tasks}
        self.raw: list[float] = []
        kinds, size = list(self.found), stage.few(50, 20)
        for _ in range(stage.few(4, 1)):  # each time with workers that are new, in whom memory lies elsewhere
            with Worker(stage, pool) as worker, stage.socket() as raw:
                cycle = median_of(cycles(stage, raw)[RAW], stage.few(500, 100))
                drains = {kind: partial(worker.drain, task) for kind, task in tasks.items()}
                for drain in drains.values():
                    drain(20)
                for order in shuffled(kinds, stage.few(ROUNDS[pool], 9)):
                    self.raw.append(cycle())
                    for kind in order:
                        self.found[kind].append(drains[kind](size))

    def added(self, kind: str) -> list[float]:
        """Seconds that this kind adds to the bare task's whole path."""
        return [one.whole - bare.whole for one, bare in zip(self.found[kind], self.found[BARE], strict=True)]

    def of_best_peer(self, kind: str) -> Spread | None:
        """What this kind adds, divided by what the peer adds that adds least; None: no peer is installed."""
        peers = [self.added(peer) for peer in PEERS if peer in self.found]
        return _shares(self.added(kind), min(peers, key=median)) if peers else None

    def cpu_ratio(self, other: str, pool: str) -> Spread:
        """CPU of all processes that this library adds, divided by what another kind adds."""
        return _shares(*(self.cpu(kind, PROCESSES[pool])[-1] for kind in (OURS, other)))

    def in_cycles(self, kind: str) -> Spread:
        """What this kind adds, divided by what a raw-socket cycle takes."""
        return _shares(self.added(kind), self.raw)

    def cpu(self, kind: str, processes: Sequence[str]) -> list[list[float]]:
        """Seconds of CPU of each process, and of all; of all kinds but the bare task what is added to its."""
        spent = [[one.cpu[name] for name in processes] for one in self.found[kind]]
        if kind != BARE:
            bare = self.found[BARE]
            spent = [
                [own - bare[number].cpu[name] for own, name in zip(one, processes, strict=True)]
                for number, one in enumerate(spent)
            ]
        return [list(figures) for figures in zip(*[(*one, sum(one)) for one in spent], strict=True)]


def _shares(added: Sequence[float], reference: Sequence[float]) -> Spread:
    """The ratio of the medians, and its 95 % interval."""
    return interval(
        lambda rounds: median([added[at] for at in rounds]) / median([reference[at] for at in rounds]), len(added)
    )


def run(stage: Stage) -> Section:
    """Measure all kinds in both pools."""
    found = {pool: Batches(stage, pool) for pool in POOLS}
    raw = [(pool, (_micro(batches.raw),)) for pool, batches in found.items()]
    tables = [Table("A raw-socket cycle in a loop, between the batches", ("µs",), raw)]
    tables += [table for pool, batches in found.items() for table in _tables(pool, batches)]
    targets = [target for pool, batches in found.items() for target in _targets(pool, batches)]
    bars = [
        Bars(
            f"Added to the whole path, {pool}", "µs", {kind: _micro(b.added(kind)) for kind in b.found if kind != BARE}
        )
        for pool, b in found.items()
    ]
    return Section("(b) whole path", HOW, tables, targets, bars)


def _tables(pool: str, batches: Batches) -> list[Table]:
    columns = ("publish, µs", "drain, µs", "both, µs", "added, µs", "/ raw cycle (95 %)", "/ best peer (95 %)")
    processes = PROCESSES[pool]
    spent = [(kind, tuple(_micro(figures) for figures in batches.cpu(kind, processes))) for kind in batches.found]
    return [
        Table(f"One task, {pool}", columns, [(kind, _cells(kind, batches)) for kind in batches.found]),
        Table(f"CPU of one task, {pool}, µs", (*processes, "all"), spent),
    ]


def _cells(kind: str, batches: Batches) -> tuple[Cell, ...]:
    took = batches.found[kind]
    cells = (
        _micro([one.published for one in took]),
        _micro([one.drained for one in took]),
        _micro([one.whole for one in took]),
    )
    if kind == BARE:
        return (*cells, "–", "–", "–")
    return (*cells, _micro(batches.added(kind)), batches.in_cycles(kind), batches.of_best_peer(kind) or "–")


def _targets(pool: str, batches: Batches) -> list[Target]:
    targets = [Target(f"{pool}: CPU of all processes / {LEAST}", batches.cpu_ratio(LEAST, pool), 1.25)]
    peers = [peer for peer in PEERS if peer in batches.found]
    if peers:
        best = min(peers, key=lambda peer: median(batches.cpu(peer, PROCESSES[pool])[-1]))
        ratio = batches.cpu_ratio(best, pool)
        targets.append(Target(f"{pool}: CPU of all processes / the best peer's ({best})", ratio, OF_BEST_PEER[pool]))
    return targets


def _micro(seconds: list[float]) -> Spread:
    return Spread.of(seconds, 1e6)
