"""Metrics of what the store has recorded of locks, for Prometheus. docs/reference/metrics.md lists all metrics.

The counters live in the store: all exporters of a store show the same ones, and the restart of an exporter resets none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter, time
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from celery_singleton_lock import __version__, locks
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.log import logger
from celery_singleton_lock.policies import KINDS
from celery_singleton_lock.store.records import BOUNDS, LOSSES, OUTCOMES, STATES, VERBS, Statistics

Answer = TypeVar("Answer")
_PREFIX = "celery_singleton_"


class _Counter(NamedTuple):
    """A counter of `locks.stats`, and the values of its label besides `task`."""

    name: str
    text: str
    label: str = ""
    values: Sequence[str] = ()


_COUNTERS = (
    _Counter("acquired", "Leases that were granted."),
    _Counter("reacquired", "Leases that were acquired again, as the store had lost them."),
    _Counter("released", "Leases that were released, by how the body ended.", "outcome", OUTCOMES),
    _Counter("expired", "Leases that expired without a release."),
    _Counter("released_by_operator", "Leases that an operator or force_unlock() released."),
    _Counter(
        "duplicates",
        "Messages that found their lock held, each counted once, by policy.",
        "policy",
        (*KINDS.values(), "callable", "custom"),
    ),
    _Counter("redelivery_checks", "Deliveries of a message that another delivery runs."),
    _Counter("starts_refused", "Starts that max_starts refused."),
    _Counter("lost", "Leases that were lost while their bodies went on, by reason.", "reason", LOSSES),
    _Counter("renewals", "Renewals of leases."),
    _Counter("renewal_failures", "Renewals that got no answer from the store."),
    _Counter("store_errors", "Calls that the store did not answer, or refused, by verb.", "verb", VERBS),
)
_HISTOGRAMS = (
    ("hold", "Seconds for which leases were held."),
    ("wait", "Seconds for which messages waited for their locks, until they started."),
)
_GAUGES: Sequence[tuple[str, str, Callable[[Statistics], float]]] = (
    ("blocked_duplicates", "The most duplicates that one of the present holders has met.", lambda one: one.blocked),
    (
        "oldest_lease_start_timestamp_seconds",
        "When the oldest lease of a running body was granted; 0: there is none.",
        lambda one: one.oldest,
    ),
    (
        "oldest_reservation_start_timestamp_seconds",
        "When the oldest lock was acquired of a message that waits for a worker; 0: there is none.",
        lambda one: one.oldest_reservation,
    ),
    (
        "oldest_pause_start_timestamp_seconds",
        "When the oldest pause by an operator began; 0: there is none.",
        lambda one: one.oldest_pause,
    ),
    (
        "last_start_timestamp_seconds",
        "When a body last started; 0: never.",
        lambda one: one.counters.get("last_start", 0) / 1000,
    ),
    (
        "last_success_timestamp_seconds",
        "When a body last succeeded; 0: never.",
        lambda one: one.counters.get("last_success", 0) / 1000,
    ),
)
#: Name, text, and the fields of INFO that are added up.
_SERVER = (
    (GaugeMetricFamily, "store_connected_clients", "Clients of the server.", ("connected_clients",)),
    (GaugeMetricFamily, "store_memory_used_bytes", "Memory that the server uses.", ("used_memory",)),
    (GaugeMetricFamily, "store_memory_max_bytes", "Memory that the server may use; 0: no limit.", ("maxmemory",)),
    (CounterMetricFamily, "store_cpu_seconds", "CPU time of the server.", ("used_cpu_sys", "used_cpu_user")),
    (CounterMetricFamily, "store_evicted_keys", "Keys that the server evicted.", ("evicted_keys",)),
)
#: All fields of INFO that are read.
SERVER_FIELDS = (*(field for *_, fields in _SERVER for field in fields), "uptime_in_seconds")


class LockCollector(Collector):
    """Asks the store at each scrape. While it cannot, there are no metrics of tasks."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._mutex = threading.Lock()
        self._errors = 0
        self._server_run = ("", 0.0)  # id of the server's process, and when that started

    def collect(self) -> Iterable[Metric]:
        with self._mutex:  # one scrape at a time
            return [*self._families()]

    def _families(self) -> Iterator[Metric]:
        begin = perf_counter()
        statistics = self._ask(locks.stats)
        is_up = statistics is not None
        self._errors += not is_up
        is_writable = is_up and self._ask(_probe) is not None
        info = self._ask(locks.server) if is_up else None  # which the login may not be allowed to ask
        yield _family(GaugeMetricFamily, "store_up", "Whether the store answers.", is_up)
        text = "Whether the store takes a write; 0: it is full, or read-only, or does not answer."
        yield _family(GaugeMetricFamily, "store_writable", text, is_writable)
        yield from task_families(statistics or ())
        yield from self._server_families(info or {})
        yield _family(CounterMetricFamily, "scrape_errors", "Scrapes that got no answer of the store.", self._errors)
        text = "How long the last scrape took."
        yield _family(GaugeMetricFamily, "scrape_duration_seconds", text, perf_counter() - begin)
        build = {"version": __version__}
        yield InfoMetricFamily(f"{_PREFIX}build", "The version of celery_singleton_lock.", build)

    def _ask(self, question: Callable[[Any], Answer]) -> Answer | None:
        try:
            return question(self._app)
        except StoreError as error:
            logger.warning("the store of locks: %s", error)
            return None

    def _server_families(self, info: Mapping[str, str]) -> Iterator[Metric]:
        for kind, name, text, fields in _SERVER:
            if all(field in info for field in fields):  # some services hide some
                yield _family(kind, name, text, sum(float(info[field]) for field in fields))
        if "uptime_in_seconds" in info:
            name, text = "store_start_timestamp_seconds", "When the server started."
            yield _family(GaugeMetricFamily, name, text, self._started(info))

    def _started(self, info: Mapping[str, str]) -> float:
        """Return when the server started: the same time at each scrape, though it tells its age in whole seconds."""
        if (run := info.get("run_id", "")) != self._server_run[0]:
            self._server_run = (run, float(round(time()) - int(info["uptime_in_seconds"])))
        return self._server_run[1]


def _probe(app: Any) -> bool:
    locks.probe(app)
    return True


def task_families(statistics: Iterable[Statistics]) -> Iterator[Metric]:
    """Yield the metrics of all tasks. All values of labels are there from the start, at zero."""
    for counter in _COUNTERS:
        labels = ["task", counter.label] if counter.label else ["task"]
        family = CounterMetricFamily(_PREFIX + counter.name, counter.text, labels=labels)
        for one in statistics:
            for value in counter.values or ("",):
                field = f"{counter.name}:{value}" if value else counter.name
                family.add_metric([one.task, value][: len(labels)], one.counters.get(field, 0))
        yield family
    for name, text in _HISTOGRAMS:
        histogram = HistogramMetricFamily(f"{_PREFIX}{name}_seconds", text, labels=["task"])
        for one in statistics:
            histogram.add_metric([one.task], _buckets(one, name), one.counters.get(f"{name}_ms", 0) / 1000)
        yield histogram
    leases = GaugeMetricFamily(f"{_PREFIX}leases", "Locks that exist now, by state.", labels=["task", "state"])
    for one in statistics:
        for state in STATES:
            leases.add_metric([one.task, state], one.states.get(state, 0))
    yield leases
    for name, text, value_of in _GAUGES:
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["task"])
        for one in statistics:
            gauge.add_metric([one.task], value_of(one))
        yield gauge


def _buckets(one: Statistics, name: str) -> Sequence[tuple[str, float]]:
    """Return the cumulative buckets of a histogram, of which the store counts each bound apart."""
    buckets, count = [], 0
    for bound in BOUNDS:
        count += one.counters.get(f"{name}:{bound}", 0)
        buckets.append(("+Inf" if bound == "inf" else str(float(bound)), float(count)))
    return buckets


def _family(kind: type[Any], name: str, text: str, value: float) -> Metric:
    family: Metric = kind(_PREFIX + name, text, value=value)
    return family


def metrics_app(app: Any) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers with the metrics of an app's locks."""
    registry = CollectorRegistry()
    registry.register(LockCollector(app))
    answer: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
    return answer
