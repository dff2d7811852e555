"""Each policy, at each place of a canvas, with each end of the holder: nobody waits for ever, all ends are the documented ones.

For each policy, the holders and canvases of all its cases run side by side; then each case is checked. Holders whose worker is
killed, or stopped for longer than a TTL, have a worker of their own.
"""

from __future__ import annotations

import math
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from celery import Celery
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryTestSetup, CeleryWorkerCluster

from celery_singleton_lock import Debounce, Replace, RetryLater, RunOnceMore
from celery_singleton_lock.policies import KINDS, NAMED, Policy
from tests.integration.environment import WorkerEnvironment
from tests.integration.nodes import WorkerSpec
from tests.integration.recorder import Recorder
from tests.interplay.canvases import HOLDERS, WORKERS, Case

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Row:
    """A policy, and what becomes of a duplicate under it, by the end of the holder. None: a policy that does not exist yet.

    The death of the holder's process and that of its whole worker come to the same: the lock ends with the process, or with its
    TTL. So do the two ways to lose a lease: by a revocation, and by its expiry while the worker is stopped.
    """

    policy: Policy | None
    succeeds: str
    fails: str
    killed: str
    loses: str
    before: int = 0  # duplicates that wait in line before the one in the canvas comes
    after: int = 0  # and that come after it

    def outcomes(self) -> dict[str, str]:
        """Return what becomes of a duplicate, by the end of the holder."""
        ends = (self.succeeds, self.fails, self.killed, self.loses, self.killed, self.loses)
        return dict(zip(HOLDERS, ends, strict=True))


# fmt: off
#: "ran": after the holder. "joined", "failed": with the holder's value or error. "refused": with `DuplicateTask`. "skipped".
POLICIES: dict[str, Row] = {
    #                              the holder   succeeds   fails      is killed  loses its lease
    "skip":         Row(NAMED["skip"],          "skipped", "skipped", "skipped", "skipped"),
    "raise":        Row(NAMED["raise"],         "refused", "refused", "refused", "refused"),
    "retry":        Row(RetryLater(0.2, 1.0),   "ran",     "ran",     "ran",     "ran"),
    "wait":         Row(NAMED["wait"],          "ran",     "ran",     "ran",     "ran"),
    "first":        Row(RunOnceMore(),          "ran",     "ran",     "ran",     "ran"),
    "second":       Row(RunOnceMore(),          "skipped", "skipped", "skipped", "skipped", before=1),
    "latest":       Row(RunOnceMore("latest"),  "ran",     "ran",     "ran",     "ran"),
    "last but one": Row(RunOnceMore("latest"),  "skipped", "skipped", "skipped", "skipped", after=1),
    "quiet":        Row(Debounce(0.5, 2.0), "ran", "ran", "ran",     "ran"),
    "join":         Row(NAMED.get("join"),      "joined",  "failed",  "ran",     "ran"),
    "replace":      Row(Replace(grace=math.inf), "ran",    "ran",     "ran",     "ran"),  # the test ends the holder
}

#: How each part of a canvas ends, by the end of its duplicate. An errback, and a callback after an error, promise nobody an end.
CANVASES: dict[str, dict[str, tuple[str, str, str]]] = {
    #                                a value         skipped         an error
    "single":       {"duplicate":  ("own end",      "own end",      "own end")},
    "chain first":  {"duplicate":  ("own end",      "own end",      "own end"),
                     "second":     ("runs",         "revoked",      "same error"),
                     "third":      ("runs",         "revoked",      "same error")},
    "chain middle": {"first":      ("runs",         "runs",         "runs"),
                     "duplicate":  ("own end",      "own end",      "own end"),
                     "third":      ("runs",         "revoked",      "same error")},
    "group":        {"duplicate":  ("own end",      "own end",      "own end"),
                     "other":      ("runs",         "runs",         "runs")},
    "chord header": {"duplicate":  ("own end",      "own end",      "own end"),
                     "other":      ("runs",         "runs",         "runs"),
                     "body":       ("collects",     "collects",     "chord error")},
    "chord body":   {"other":      ("runs",         "runs",         "runs"),
                     "duplicate":  ("own end",      "own end",      "own end")},
    "linked":       {"duplicate":  ("own end",      "own end",      "own end"),
                     "callback":   ("runs",         "revoked",      "never runs"),
                     "errback":    ("never runs",   "never runs",   "is called")},
}
# fmt: on


@pytest.fixture(scope="module")
def worker_specs() -> Sequence[WorkerSpec]:
    """A worker in which all holders of a policy run at once, with processes left for other tasks; one to kill, one to stop."""
    holders = len(HOLDERS) - len(WORKERS)
    one = WorkerSpec("prefork", concurrency=holders * len(CANVASES) + 8)
    return (one, *(WorkerSpec("threads", concurrency=len(CANVASES), copy=number) for number in WORKERS.values()))


@pytest.fixture(scope="module", params=[name for name, row in POLICIES.items() if row.policy])
def policy(request: pytest.FixtureRequest) -> str:
    """The name of a row."""
    return str(request.param)


@pytest.fixture(scope="module")
def cases(
    policy: str,
    celery_worker_cluster: CeleryWorkerCluster,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    celery_setup_app: Celery,
    recorder: Recorder,
) -> Iterator[dict[tuple[str, str], Case]]:
    """All cases of a policy, whose holders have begun to end."""
    clusters = (celery_worker_cluster, celery_broker_cluster, celery_backend_cluster)
    env = WorkerEnvironment(CeleryTestSetup(*clusters, celery_setup_app), recorder, secrets.token_hex(6))
    row = POLICIES[policy]
    assert row.policy
    assert celery_worker_cluster.ready()  # the one that was killed was started again
    found = {(place, end): Case(env, row.policy, place, end) for place in CANVASES for end in HOLDERS}
    try:
        start(list(found.values()), row)
        end_workers(celery_worker_cluster, list(found.values()), row)
        yield found
    finally:
        env.let_all_go()


def start(cases: list[Case], row: Row) -> None:
    """Let each duplicate meet its holder, and then the holders end."""
    for case in cases:
        case.start_holder()
    for case in cases:
        case.holder_start()
    send_others(cases, row.before)
    for case in cases:
        case.send_canvas()
    for case in cases:
        case.wait_for_decision(case.ids["duplicate"])
    send_others(cases, row.after)
    for case in cases:
        case.end_holder()


def end_workers(cluster: CeleryWorkerCluster, cases: list[Case], row: Row) -> None:
    """Kill one worker, and stop another until the leases of its bodies have expired. Then both work again.

    These leases are long, so that none expires in a moment of slowness before; they are cut here.
    """
    killed, stopped = (cluster[number].container for number in WORKERS.values())
    killed.kill()
    stopped.signal_all(signal.SIGSTOP)
    try:
        for case in cases:
            if case.end in WORKERS:
                case.expire()
        for case in cases:
            if case.end == "its worker is stopped":
                case.wait_for_expiry(row.loses == "ran")
    finally:
        stopped.signal_all(signal.SIGCONT)
        killed.start()


def send_others(cases: list[Case], count: int) -> None:
    """Let each holder meet so many other duplicates."""
    for _ in range(count):
        for case in cases:
            case.send_other()
        for case in cases:
            case.wait_for_decision(case.others[-1].id)


@pytest.mark.parametrize("end", HOLDERS)
@pytest.mark.parametrize("place", CANVASES)
def test_duplicate(cases: dict[tuple[str, str], Case], policy: str, place: str, end: str) -> None:
    """Each task id that a caller knows ends within the deadline, as the two tables say, and so does the holder."""
    row = POLICIES[policy]
    outcome = row.outcomes()[end]
    column = 1 if outcome == "skipped" else 2 if outcome in ("refused", "failed") else 0
    cases[place, end].check(outcome, {part: words[column] for part, words in CANVASES[place].items()})


def test_all_policies() -> None:
    """Each policy that has a name is in the table."""
    assert set() == set(KINDS) - {type(row.policy) for row in POLICIES.values()}
