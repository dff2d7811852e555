"""Reads the records that the scripts have written, and pauses tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.store.keys import pauses_key, record_keys
from celery_singleton_lock.store.records import SEPARATOR, Lock, Run, task_of
from celery_singleton_lock.store.redis.calls import ScriptCall, count_call, ms, page_call, script_call, sweep_call
from celery_singleton_lock.store.redis.connection import Command

#: About how many locks one call reads: a call that keeps the server busy for milliseconds would delay others.
PAGE = "100"
#: What the name of a pause is followed by in the field that says since when, by whom and why.
_ABOUT = ":about"
#: How many task names are asked about in one round trip. The server may run all its calls before those of others.
GROUP = 20


class _Server(Protocol):
    def run(self, call: ScriptCall) -> Any:
        """Run a script."""

    def run_all(self, calls: Sequence[Command]) -> list[Any]:
        """Run scripts and commands in one round trip."""

    def command(self, *words: str) -> Any:
        """Send a command."""


class RedisRecords:
    """The `RecordStore` of a Redis or Valkey server; `history`: how many runs are kept."""

    def __init__(self, server: _Server, history: int) -> None:
        self._server = server
        self._history = history

    def add_tasks(self, key: str, tasks: Mapping[str, str]) -> None:
        self._server.command("HSET", key, *(word for pair in tasks.items() for word in pair))

    def tasks(self, key: str) -> Mapping[str, str]:
        return dict(pairs(self._server.command("HGETALL", key)))

    def slots(self, base: str, digest: str) -> list[str]:
        found = self._server.command("SMEMBERS", f"{base}:slots:{digest}")
        return [f"{base}:lock:{digest}:{slot}" for slot in sorted(found, key=int)]

    def sweep(self, *bases: str) -> None:
        for some in _groups(bases):
            self._swept(some)

    def _swept(self, bases: Sequence[str]) -> Sequence[Mapping[str, int]]:
        """Count the leases that have expired; return the counters of each name afterwards."""
        sweeps = [sweep_call(base, self._history) for base in bases]
        reads = [Command("HGETALL", record_keys(base)[1]) for base in bases]
        while any((replies := self._server.run_all([*sweeps, *reads]))[: len(sweeps)]):
            pass  # one call counts so many that it does not keep the server busy
        return [counters_of(found) for found in replies[len(sweeps) :]]

    def locks(self, *bases: str) -> Iterator[Lock]:
        for some in _groups(bases):
            pauses = [Command("HGETALL", pauses_key(base)) for base in some]
            first = [page_call(base, "0", PAGE) for base in some]
            replies = self._server.run_all([*pauses, *first])
            pages = dict(zip(some, replies[len(some) :], strict=True))
            for base, found in zip(some, replies, strict=False):
                yield from _pauses_of(base, found, int(pages[base][1]) / 1000)
            yield from self._rest_of(pages)

    def _rest_of(self, pages: Mapping[str, Sequence[str]]) -> Iterator[Lock]:
        """Yield the locks on the first pages of registries, and those on the others."""
        seen: set[str] = set()  # a scan may find an entry twice
        while pages:
            for base, (_, now, *found) in pages.items():
                for text in found:
                    if base + text.split(SEPARATOR, 5)[5] not in seen:
                        seen.add(base + text.split(SEPARATOR, 5)[5])
                        yield _lock_of(base, text, int(now) / 1000)
            calls = {base: page_call(base, cursor, PAGE) for base, (cursor, *_) in pages.items() if cursor != "0"}
            replies = self._server.run_all([*calls.values()]) if calls else ()
            pages = dict(zip(calls, replies, strict=True))

    def recorded(self, *bases: str) -> Iterator[tuple[Mapping[str, int], list[Lock]]]:
        for some in _groups(bases):
            counters = self._swept(some)
            locks: dict[str, list[Lock]] = {task_of(base): [] for base in some}
            for lock in self.locks(*some):
                locks[lock.task].append(lock)
            yield from zip(counters, locks.values(), strict=True)

    def count(self, base: str, counted: Mapping[str, int]) -> None:
        self._server.run(count_call(base, counted))

    def counters(self, base: str) -> Mapping[str, int]:
        return counters_of(self._server.command("HGETALL", record_keys(base)[1]))

    def history(self, base: str) -> list[Run]:
        found = (
            self._server.command("LRANGE", record_keys(base)[2], "0", str(self._history - 1)) if self._history else ()
        )
        runs = [run_of(base, one) for one in found]
        return sorted(runs, key=lambda run: run.ended, reverse=True)  # an expired one is noted late

    def pause(self, base: str, name: str, seconds: float, by: str = "", reason: str = "") -> None:
        self._server.run(script_call("pause", (pauses_key(base),), (name, ms(seconds), f"{by}{SEPARATOR}{reason}")))

    def resume(self, base: str, name: str) -> bool:
        ends = int(self._server.command("HGET", pauses_key(base), name) or 0)
        is_paused = ends / 1000 > self._now()
        self._server.command("HDEL", pauses_key(base), name, name + _ABOUT)
        return is_paused

    def server(self) -> Mapping[str, str]:
        lines = str(self._server.command("INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def _now(self) -> float:
        seconds, microseconds = self._server.command("TIME")
        return int(seconds) + int(microseconds) / 1e6


def _groups(bases: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the names that are asked about in one round trip: the server answers others after all its replies."""
    return (bases[start : start + GROUP] for start in range(0, len(bases), GROUP))


def _pauses_of(base: str, found: Sequence[Any], now: float) -> Iterator[Lock]:
    """Yield operators' pauses."""
    fields = dict(pairs(found))
    for name, ends in fields.items():
        remaining = 0.0 if name.endswith(_ABOUT) else int(ends) / 1000 - now
        if remaining > 0:
            since, _, about = fields.get(name + _ABOUT, "0").partition(SEPARATOR)
            granted, (by, reason) = int(since) / 1000, told_of_pause(about)
            age = max(0.0, now - granted)
            holder = Holder(age=age, remaining=remaining, state="paused", by=by, reason=reason)
            yield Lock(task_of(base), f"{base}:lock:{name}", holder, since=granted)


def told_of_pause(text: str) -> tuple[str, str]:
    """Return who has paused it, and why."""
    by, _, reason = text.partition(SEPARATOR)
    return by, reason


def _lock_of(base: str, text: str, now: float) -> Lock:
    """Return the lock that a text of `page.lua` tells of."""
    expires, duplicates, waiting, ttl, renewed, entry = text.split(SEPARATOR, 5)
    holder, digest, since = _holder_of(entry, now, float(expires) / 1000)
    missing = duplicates == "-"
    if not missing:
        holder = holder.with_renewal(now - max(since, int(renewed) / 1000), int(ttl) / 1000)
    met = 0 if missing else int(duplicates)
    return Lock(task_of(base), f"{base}:lock:{digest}", holder, met, int(waiting), since, missing)


def _holder_of(entry: str, now: float, expires: float) -> tuple[Holder, str, float]:
    """Return whom an entry of the registry tells of, the digest of the lock, and since when it is held."""
    state, fence, since, pid, node, digest, task_id = entry.split(SEPARATOR, 6)
    granted = int(since) / 1000
    age, remaining = max(0.0, now - granted), max(0.0, expires - now)
    return Holder(task_id, node, int(pid), age, remaining, int(fence), state), digest, granted


def counters_of(found: Sequence[Any]) -> Mapping[str, int]:
    """Return the counters of a task name from the fields of its hash.

    The end of a body has one field for its outcome and the time that the lock was held, such as `released:success:0.1`: a
    field less for each run to write.
    """
    counters: Counter[str] = Counter()
    for field, number in pairs(found):
        name, _, label = field.partition(":")
        outcome, _, bound = label.partition(":")
        counters[f"{name}:{outcome}" if label else name] += int(number)
        if bound:
            counters[f"hold:{bound}"] += int(number)
    return dict(counters)


def run_of(base: str, text: str) -> Run:
    """Return the run that an entry of the history tells of."""
    ended, outcome, error, lease, _, _, since, pid, node, digest, task_id = text.split(SEPARATOR, 10)
    times = int(since) / 1000, int(ended) / 1000
    return Run(task_of(base), f"{base}:lock:{digest}", task_id, node, int(pid), *times, outcome, error, lease)


def pairs(found: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the names and values of a reply."""
    return list(zip(found[::2], found[1::2], strict=True))
