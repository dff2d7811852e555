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
from celery_singleton_lock.store.requests import Kept, LeaseRequest, Place

#: Of a feature that has no words.
_NONE = Words()
Features = Mapping[str, Words]


class ScriptCall(Command):
    """A script, and the words of its call that come after it."""

    def __init__(self, found: Script, *words: str) -> None:
        super().__init__(*words)
        self.script, self.digest = found.text, found.digest

    def command(self, with_text: bool = False) -> Command:
        """Return what runs the script: by its digest, or with its text where the server does not know it."""
        head = ("EVAL", self.script) if with_text else ("EVALSHA", self.digest)
        command = Command(*head, *self.texts)
        command.optional = self.optional
        return command


def script_call(
    verb: str, keys: Sequence[str], arguments: Sequence[str] = (), features: Features = MappingProxyType({})
) -> ScriptCall:
    """Return a call with the keys and arguments of its features after its own."""
    found = script(verb, frozenset(features))
    if features:
        used = [features[name] for name in found.features]
        keys = [*keys, *[key for words in used for key in words.keys]]
        arguments = [*arguments, *[argument for words in used for argument in words.arguments]]
    return ScriptCall(found, str(len(keys)), *keys, *arguments)


def acquire_call(wanted: LeaseRequest, history: int | None, grace: bool = False) -> ScriptCall:
    """Return the call that acquires a lock.

    Arguments:
        history: how many runs are kept; None: nothing is recorded.
        grace: whether a lock that may have been lost with the store's data is granted to nobody for a TTL.
    """
    lock = wanted.slot_lock(0) if wanted.limit else wanted.lock
    keys = (wanted.completed, *task_keys(wanted.base), pauses_key(wanted.base))
    features = {**_acquire_features(wanted), **_acquire_records(wanted, history)}
    if grace:
        features["grace"] = Words((primary_key(wanted.base),), (ms(wanted.grace or wanted.ttl),))
    return _request_call("acquire", wanted, lock, keys, "1" if wanted.redelivered else "", features)


def reacquire_call(wanted: LeaseRequest, fence: int, history: int | None) -> ScriptCall:
    """Return the call that acquires a missing lock again."""
    features = {} if history is None else {"records": Words(record_keys(wanted.base)[:2])}
    if wanted.limit:
        features["limit"] = Words((wanted.slots,), (str(wanted.limit),))
    return _request_call("reacquire", wanted, wanted.lock, task_keys(wanted.base), str(fence), features)


def _request_call(
    verb: str, wanted: LeaseRequest, lock: str, keys: Sequence[str], last: str, features: Features
) -> ScriptCall:
    is_noted = wanted.supervised or (wanted.limit and not wanted.queued)
    who = (str(wanted.task_id), wanted.node, str(wanted.pid), "1" if is_noted else "")
    return script_call(verb, (lock, wanted.attempt, *keys), (wanted.token, ms(wanted.ttl), *who, last), features)


def _acquire_features(wanted: LeaseRequest) -> dict[str, Words]:
    """Return the features of an acquire that few tasks use."""
    features: dict[str, Words] = {}
    if wanted.limit:
        features["limit"] = Words((wanted.slots,), (str(wanted.limit),))
    if wanted.queued:
        features["queued"] = _NONE
    if wanted.max_starts is not None:
        limit = wanted.max_starts
        features["starts"] = Words((wanted.starts,), (str(limit.n), ms(limit.per)))
        if wanted.limit and limit.count == "crashed":
            features["crashed"] = _NONE
    if wanted.comes_again and not wanted.queued:
        features["begun"] = Words((begun_key(wanted.base),), (ms(BEGUN_TTL),))
    if wanted.place:
        features.update(_line_features(wanted, wanted.place))
    return features


def _line_features(wanted: LeaseRequest, place: Place) -> dict[str, Words]:
    room = "all" if place.replace else str(place.room or "")
    numbers = (place.ticket, _number(place.copy), _number(place.next_copy))
    arguments = (
        *numbers,
        room,
        ms(place.due),
        place.message,
        ms(COPY_TTL),
        "1" if place.gives_way or place.replace else "",
    )
    features = {"line": Words(line_keys(wanted.base, wanted.digest), arguments)}
    if place.stop:
        features["stop"] = Words((replaced_key(wanted.base),))
    if place.quiet:
        features["debounce"] = Words((), (ms(place.quiet), ms(place.max_quiet)))
    if not wanted.queued:
        features["body"] = _NONE
    if not wanted.queued or wanted.token == LINE_TOKEN:  # a publisher publishes nothing but its own message
        features["dispatch"] = _NONE
    return features


def _acquire_records(wanted: LeaseRequest, history: int | None) -> dict[str, Words]:
    if history is None:
        return {}
    noted = wanted.noted
    arguments = (noted.policy, ms(noted.waited) if noted.waited else "", str(history))
    features = {"records": Words(record_keys(wanted.base), arguments)}
    if noted.counted:
        features["counts"] = Words((), (_counts(noted.counted),))
    return features


def count_call(base: str, counted: Mapping[str, int]) -> ScriptCall:
    """Return the call that adds what a process has counted."""
    return script_call("count", record_keys(base)[1:2], (_counts(counted),))


def _counts(counted: Mapping[str, int]) -> str:
    return " ".join(f"{name}={number}" for name, number in counted.items())


def oldest_of(slots: str) -> Features:
    """Return the feature that finds the oldest of several holders, if there are slots."""
    return {"limit": Words((slots,))} if slots else {}


def release_call(wanted: LeaseRequest, success: bool | None, kept: Kept | None, history: int | None) -> ScriptCall:
    """Return the call that releases a lock."""
    features: dict[str, Words] = {}
    if wanted.limit:
        features["limit"] = Words((wanted.slots,))
        if wanted.queued:
            features["queued"] = Words((wanted.slot_lock(0),))
    if kept:
        features["kept"] = Words((), (kept.token, kept.state, ms(kept.ttl)))
    if wanted.max_starts is not None and (ended := wanted.ended_starts(success)):
        features["starts"] = Words((wanted.starts,), (ended,))
    if wanted.comes_again and not wanted.is_unfinished:
        features["begun"] = Words((begun_key(wanted.base),), (str(wanted.task_id),))
    if wanted.is_continued:
        features["continued"] = Words((wanted.continued,), (ms(CONTINUED_TTL),))
    if history is not None:
        noted = wanted.noted
        slot = wanted.lock.removeprefix(f"{wanted.base}:lock:")
        where = SEPARATOR.join((str(wanted.pid), wanted.node, slot, str(wanted.task_id)))
        arguments = (noted.outcome, noted.error, str(history), noted.loss, str(noted.fence or ""), where)
        features["records"] = Words(record_keys(wanted.base), arguments)
    keys = (_lock(wanted), wanted.attempt, wanted.completed)
    return script_call("release", keys, (wanted.token, ms(wanted.ttl), "1" if success else ""), features)


def leave_call(wanted: LeaseRequest, ticket: str) -> ScriptCall:
    """Return the call that takes a message out of the line."""
    keys = (*line_keys(wanted.base, wanted.digest), wanted.lock)
    words = (ticket, ms(COPY_TTL), ms(wanted.ttl), str(wanted.limit))
    return script_call("leave", keys, words, {"limit": _NONE} if wanted.limit else {})


def give_back_call(wanted: LeaseRequest, ticket: str, message: str) -> ScriptCall:
    """Return the call that gives back the turn of a message."""
    line, waiting, _ = line_keys(wanted.base, wanted.digest)
    return script_call("give_back", (line, waiting, wanted.lock), (ticket, message))


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


def renewal_call(leases: Sequence[LeaseRequest]) -> ScriptCall:
    """Return the call that renews leases."""
    keys = [key for one in leases for key in (_lock(one), one.attempt, f"{one.base}:revoked", f"{one.base}:registry")]
    features = {"limit": _NONE} if any(one.limit for one in leases) else {}
    if any(one.stoppable for one in leases):
        features["stop"] = Words((), ("".join(str(int(one.stoppable)) for one in leases),))
    return script_call("renew", keys, [word for one in leases for word in (one.token, ms(one.ttl))], features)


def _lock(wanted: LeaseRequest) -> str:
    """Return the key of the lock; where only the token is known, the attempt key, which names it."""
    return wanted.attempt if wanted.by_token else wanted.lock


def _number(copy: float) -> str:
    return f"{copy:.6f}"


def ms(seconds: float) -> str:
    """Return whole milliseconds."""
    return str(int(seconds * 1000))
