"""From a request to the words of a script call: which script, with which features, keys and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from celery_singleton_lock.store.keys import (
    BEGUN_TTL,
    CONTINUED_TTL,
    COPY_TTL,
    LINE_TOKEN,
    REVOKED_TTL,
    begun_key,
    line_keys,
    pauses_key,
    primary_key,
    record_keys,
    replaced_key,
    task_keys,
)
from celery_singleton_lock.store.records import SEPARATOR
from celery_singleton_lock.store.redis.connection import Command
from celery_singleton_lock.store.redis.scripts import Script, Words, script
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place

#: Of a feature that has no words.
_NONE = Words()
Features = Mapping[str, Words]


class ScriptCall(Command):
    """A call of a script by its digest."""

    def __init__(self, found: Script, *words: str) -> None:
        super().__init__("EVALSHA", found.digest, *words)
        self.script, self.digest = found.text, found.digest

    def with_text(self) -> Command:
        """Return the call for a server that does not know the script."""
        command = Command("EVAL", self.script, *self.texts[2:])
        command.optional = self.optional
        return command


def script_call(
    verb: str, keys: Sequence[str], arguments: Sequence[str] = (), features: Features = MappingProxyType({})
) -> ScriptCall:
    """Return a call with the keys and arguments of its features after its own."""
    found = script(verb, frozenset(features))
    keys, arguments = [*keys], [*arguments]
    for name in found.features:
        keys += features[name].keys
        arguments += features[name].arguments
    return ScriptCall(found, str(len(keys)), *keys, *arguments)


def acquire_call(spec: LeaseSpec, history: int | None, grace: bool = False) -> ScriptCall:
    """Return the call that acquires a lock.

    Arguments:
        history: how many runs are kept; None: nothing is recorded.
        grace: whether a lock that may have been lost with the store's data is granted to nobody for a TTL.
    """
    lock = spec.slot_lock(0) if spec.limit else spec.lock
    keys = (spec.completed, *task_keys(spec.base), pauses_key(spec.base))
    features = {**_acquire_features(spec), **_acquire_records(spec, history)}
    if grace:
        features["grace"] = Words((primary_key(spec.base),), (ms(spec.grace or spec.ttl),))
    return _request_call("acquire", spec, lock, keys, "1" if spec.redelivered else "", features)


def reacquire_call(spec: LeaseSpec, fence: int, history: int | None) -> ScriptCall:
    """Return the call that acquires a missing lock again."""
    features = {} if history is None else {"records": Words(record_keys(spec.base)[:2])}
    if spec.limit:
        features["limit"] = Words((spec.slots,), (str(spec.limit),))
    return _request_call("reacquire", spec, spec.lock, task_keys(spec.base), str(fence), features)


def _request_call(
    verb: str, spec: LeaseSpec, lock: str, keys: Sequence[str], last: str, features: Features
) -> ScriptCall:
    is_noted = spec.supervised or (spec.limit and not spec.queued)
    who = (str(spec.task_id), spec.node, str(spec.pid), "1" if is_noted else "")
    return script_call(verb, (lock, spec.attempt, *keys), (spec.token, ms(spec.ttl), *who, last), features)


def _acquire_features(spec: LeaseSpec) -> dict[str, Words]:
    """Return the features of an acquire that few tasks use."""
    features: dict[str, Words] = {}
    if spec.limit:
        features["limit"] = Words((spec.slots,), (str(spec.limit),))
    if spec.queued:
        features["queued"] = _NONE
    if spec.max_starts is not None:
        limit = spec.max_starts
        features["starts"] = Words((spec.starts,), (str(limit.n), ms(limit.per)))
        if spec.limit and limit.count == "crashed":
            features["crashed"] = _NONE
    if spec.comes_again and not spec.queued:
        features["begun"] = Words((begun_key(spec.base),), (ms(BEGUN_TTL),))
    if spec.place:
        features.update(_line_features(spec, spec.place))
    return features


def _line_features(spec: LeaseSpec, place: Place) -> dict[str, Words]:
    room = "all" if place.replace else str(place.room or "")
    numbers = (place.identity, place.ticket, _number(place.copy), _number(place.next_copy))
    arguments = (
        *numbers,
        room,
        ms(place.due),
        place.message,
        ms(COPY_TTL),
        "1" if place.gives_way or place.replace else "",
    )
    features = {"line": Words(line_keys(spec.base, spec.digest), arguments)}
    if place.stop:
        features["stop"] = Words((replaced_key(spec.base),))
    if place.quiet:
        features["debounce"] = Words((), (ms(place.quiet), ms(place.max_quiet)))
    if not spec.queued:
        features["body"] = _NONE
    if not spec.queued or spec.token == LINE_TOKEN:  # a publisher publishes nothing but its own message
        features["dispatch"] = _NONE
    return features


def _acquire_records(spec: LeaseSpec, history: int | None) -> dict[str, Words]:
    if history is None:
        return {}
    record = spec.record
    arguments = (record.policy, ms(record.waited) if record.waited else "", str(history))
    return {"records": Words(record_keys(spec.base), arguments)}


def count_call(base: str, counted: Mapping[str, int]) -> ScriptCall:
    """Return the call that adds what a process has counted."""
    numbers = " ".join(f"{name}={number}" for name, number in counted.items())
    return script_call("count", record_keys(base)[1:2], (numbers,))


def oldest_of(slots: str) -> Features:
    """Return the feature that finds the oldest of several holders, if there are slots."""
    return {"limit": Words((slots,))} if slots else {}


def release_call(spec: LeaseSpec, success: bool | None, kept: AfterRelease | None, history: int | None) -> ScriptCall:
    """Return the call that releases a lock."""
    features: dict[str, Words] = {}
    if spec.limit:
        features["limit"] = Words((spec.slots,))
        if spec.queued:
            features["queued"] = Words((spec.slot_lock(0),))
    if kept:
        features["kept"] = Words((), (kept.token, kept.state, ms(kept.ttl)))
    if spec.max_starts is not None and (ended := spec.ended_starts(success)):
        features["starts"] = Words((spec.starts,), (ended,))
    if spec.comes_again and not spec.is_unfinished:
        features["begun"] = Words((begun_key(spec.base),), (str(spec.task_id),))
    if spec.is_continued:
        features["continued"] = Words((spec.continued,), (ms(CONTINUED_TTL),))
    if history is not None:
        record = spec.record
        slot = spec.lock.removeprefix(f"{spec.base}:lock:")
        where = SEPARATOR.join((str(spec.pid), spec.node, slot, str(spec.task_id)))
        arguments = (record.outcome, record.error, str(history), record.loss, str(record.fence or ""), where)
        features["records"] = Words(record_keys(spec.base), arguments)
    keys = (_lock(spec), spec.attempt, spec.completed)
    return script_call("release", keys, (spec.token, ms(spec.ttl), "1" if success else ""), features)


def leave_call(spec: LeaseSpec, ticket: str) -> ScriptCall:
    """Return the call that takes a message out of the line."""
    keys = (*line_keys(spec.base, spec.digest), spec.lock)
    words = (ticket, ms(COPY_TTL), ms(spec.ttl), str(spec.limit))
    return script_call("leave", keys, words, {"limit": _NONE} if spec.limit else {})


def give_back_call(spec: LeaseSpec, ticket: str, message: str) -> ScriptCall:
    """Return the call that gives back the turn of a message."""
    line, waiting, _ = line_keys(spec.base, spec.digest)
    return script_call("give_back", (line, waiting, spec.lock), (ticket, message))


def revoke_call(base: str, lock: str, slots: str, starts: str, fence: int, history: int | None) -> ScriptCall:
    """Return the call that takes a lock from its holder, or from the lease with this fence alone."""
    features = dict(oldest_of(slots))
    if starts:
        features["starts"] = Words((starts,))
    if history is not None:
        features["records"] = Words(record_keys(base), (str(history),))
    words = (ms(REVOKED_TTL), str(fence) if fence else "")
    return script_call("revoke", (lock, *task_keys(base)), words, features)


def sweep_call(base: str, history: int) -> ScriptCall:
    """Return the call that counts leases that have expired. A full or read-only server refuses it, and is read all the same."""
    call = script_call("sweep", record_keys(base), (str(history),))
    call.optional = True
    return call


def page_call(base: str, cursor: str, count: str) -> ScriptCall:
    """Return the call that reads a part of the registry."""
    return script_call("page", record_keys(base)[:1], (cursor, count, base))


def renewal_call(leases: Sequence[LeaseSpec]) -> ScriptCall:
    """Return the call that renews leases."""
    keys = [key for one in leases for key in (_lock(one), one.attempt, f"{one.base}:revoked", f"{one.base}:registry")]
    features = {"limit": _NONE} if any(one.limit for one in leases) else {}
    if any(one.stoppable for one in leases):
        features["stop"] = Words((), ("".join(str(int(one.stoppable)) for one in leases),))
    return script_call("renew", keys, [word for one in leases for word in (one.token, ms(one.ttl))], features)


def _lock(spec: LeaseSpec) -> str:
    """Return the key of the lock; where only the token is known, the attempt key, which names it."""
    return spec.attempt if spec.by_token else spec.lock


def _number(copy: float) -> str:
    return f"{copy:.6f}"


def ms(seconds: float) -> str:
    """Return whole milliseconds."""
    return str(int(seconds * 1000))
