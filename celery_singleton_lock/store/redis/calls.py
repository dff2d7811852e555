"""From a request to the words of a script call: which script, with which parts, keys and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from celery_singleton_lock.store.protocol import (
    BEGUN_TTL,
    CONTINUED_TTL,
    COPY_TTL,
    LINE_TOKEN,
    REVOKED_TTL,
    Kept,
    LeaseRequest,
    Place,
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
from celery_singleton_lock.store.redis.scripts import Part, script

#: The parts of the part "recorded", and of others that are in the script.
_RECORDED = tuple(map(Part, ("observe", "swept", "logged", "refused", "waits", "barred", "freed", "entry")))
_RELEASE_RECORDED = tuple(map(Part, ("observe", "logged", "listed", "entry")))
_ENTRY = Part("entry")
_SWEPT = (Part("swept"), Part("logged"))
_NEXT = Part("next")


class ScriptCall(Command):
    """A script, and the words of its call that come after it."""

    def __init__(self, verb: str, parts: Sequence[Part], *words: str) -> None:
        super().__init__(*words)
        self.script, self.digest = script(verb, tuple([part.name for part in parts]))

    def command(self, with_text: bool = False) -> Command:
        """Return what runs the script: by its digest, or with its text where the server does not know it."""
        head = ("EVAL", self.script) if with_text else ("EVALSHA", self.digest)
        command = Command(*head, *self.texts)
        command.optional = self.optional
        return command


def script_call(
    verb: str, keys: Sequence[str], arguments: Sequence[str] = (), parts: Sequence[Part] = ()
) -> ScriptCall:
    """Return a call with the keys and arguments of its parts after its own."""
    if parts:
        keys = [*keys, *[key for part in parts for key in part.keys]]
        arguments = [*arguments, *[argument for part in parts for argument in part.arguments]]
    return ScriptCall(verb, parts, str(len(keys)), *keys, *arguments)


def acquire_call(wanted: LeaseRequest, history: int | None, grace: bool = False) -> ScriptCall:
    """Return the call that acquires a lock.

    Arguments:
        history: how many runs are kept; None: nothing is recorded.
        grace: whether a lock that may have been lost with the store's data is granted to nobody for a TTL.
    """
    lock = wanted.slot_lock(0) if wanted.limit else wanted.lock
    keys = (wanted.completed, *task_keys(wanted.base), pauses_key(wanted.base))
    parts = [*_acquire_parts(wanted), *_acquire_records(wanted, history)]
    if grace:
        parts.append(Part("grace", (primary_key(wanted.base),), (ms(wanted.grace or wanted.ttl),)))
    return _request_call("acquire", wanted, lock, keys, "1" if wanted.redelivered else "", parts)


def reacquire_call(wanted: LeaseRequest, fence: int, history: int | None) -> ScriptCall:
    """Return the call that acquires a missing lock again."""
    registry, stats, _ = record_keys(wanted.base)
    parts = [] if history is None else [Part("recorded", (registry, stats)), _ENTRY]
    if wanted.limit:
        parts.append(Part("slot", (wanted.slots,), (str(wanted.limit),)))
    return _request_call("reacquire", wanted, wanted.lock, task_keys(wanted.base), str(fence), parts)


def _request_call(
    verb: str, wanted: LeaseRequest, lock: str, keys: Sequence[str], last: str, parts: Sequence[Part]
) -> ScriptCall:
    is_noted = wanted.supervised or (wanted.limit and not wanted.queued)
    who = (str(wanted.task_id), wanted.node, str(wanted.pid), "1" if is_noted else "")
    return script_call(verb, (lock, wanted.attempt, *keys), (wanted.token, ms(wanted.ttl), *who, last), parts)


def _acquire_parts(wanted: LeaseRequest) -> Sequence[Part]:
    """Return the parts of an acquire for what few tasks use."""
    parts: list[Part] = []
    if wanted.limit:  # choose a slot, and answer which
        parts += [Part("limit", (wanted.slots,), (str(wanted.limit),)), Part("slot")]
    if wanted.queued:
        parts.append(Part("queued"))
    if wanted.max_starts is not None:
        limit = wanted.max_starts
        parts.append(Part("starts", (wanted.starts,), (str(limit.n), ms(limit.per))))
        if wanted.limit and limit.count == "crashed":
            parts.append(Part("running"))
    if wanted.comes_again and not wanted.queued:
        parts.append(Part("begun", (begun_key(wanted.base),), (ms(BEGUN_TTL),)))
    if wanted.place:
        parts += _line_parts(wanted, wanted.place)
    return parts


def oldest_parts(slots: str) -> Sequence[Part]:
    """Return the part that finds the oldest of several holders, if there are slots."""
    return (Part("limit", (slots,)),) if slots else ()


def _acquire_records(wanted: LeaseRequest, history: int | None) -> Sequence[Part]:
    """Return the parts that record an acquire, after those that contain their lines."""
    if history is None:
        return ()
    noted = wanted.noted
    arguments = (noted.policy, ms(noted.waited) if noted.waited else "", str(history))
    parts = (Part("recorded", record_keys(wanted.base), arguments), *_RECORDED)
    if not noted.counted:
        return parts
    return (*parts, _counted(noted.counted))


def count_call(base: str, counted: Mapping[str, int]) -> ScriptCall:
    """Return the call that adds what a process has counted."""
    return script_call("count", record_keys(base)[1:2], (), (_counted(counted),))


def _counted(counted: Mapping[str, int]) -> Part:
    return Part("counted", (), (" ".join(f"{name}={number}" for name, number in counted.items()),))


def _line_parts(wanted: LeaseRequest, place: Place) -> Sequence[Part]:
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
    parts = [Part("line", line_keys(wanted.base, wanted.digest), arguments)]
    if place.stop:
        parts += [Part("replaced", (replaced_key(wanted.base),)), Part("stop"), Part("asked")]
    if wanted.limit:
        parts += [Part("turns"), Part("named")]
    if place.quiet:
        quiet = (ms(place.quiet), ms(place.max_quiet))
        parts += [Part("quiet", (), quiet), Part("ripe"), Part("left")]
    if not wanted.queued or wanted.token == LINE_TOKEN:  # a publisher publishes nothing but its own message
        parts.append(Part("call"))
    if not wanted.queued:
        parts += [Part("started"), *([Part("calm")] if place.quiet else [])]
    return parts


def release_call(wanted: LeaseRequest, success: bool | None, kept: Kept | None, history: int | None) -> ScriptCall:
    """Return the call that releases a lock."""
    keys = (_lock(wanted), wanted.attempt, wanted.completed)
    parts: list[Part] = []
    if wanted.limit and wanted.queued:
        parts.append(Part("queued", (wanted.slots, wanted.slot_lock(0))))
    if kept:
        parts.append(Part("kept", (), (kept.token, kept.state, ms(kept.ttl))))
    if wanted.limit:
        parts += [Part("slot", (wanted.slots,))] if kept else [Part("limit"), Part("next_slot")]
    else:
        parts.append(_NEXT)
    if wanted.max_starts is not None and (ended := wanted.ended_starts(success)):
        parts.append(Part("starts", (wanted.starts,), (ended,)))
    if wanted.comes_again and not wanted.is_unfinished:
        parts.append(Part("begun", (begun_key(wanted.base),), (str(wanted.task_id),)))
    if wanted.is_continued:
        parts.append(Part("continued", (wanted.continued,), (ms(CONTINUED_TTL),)))
    if history is not None:
        noted = wanted.noted
        arguments = (noted.outcome, noted.error, str(history), noted.loss)
        slot = wanted.lock.removeprefix(f"{wanted.base}:lock:")
        where = SEPARATOR.join((str(wanted.pid), wanted.node, slot, str(wanted.task_id)))
        parts.append(Part("recorded", record_keys(wanted.base), arguments))
        parts.append(Part("late", (), (str(noted.fence or ""), where)))
        parts += _RELEASE_RECORDED
    return script_call("release", keys, (wanted.token, ms(wanted.ttl), "1" if success else ""), parts)


def leave_call(wanted: LeaseRequest, ticket: str) -> ScriptCall:
    """Return the call that takes a message out of the line."""
    keys = (*line_keys(wanted.base, wanted.digest), wanted.lock)
    words = (ticket, ms(COPY_TTL), ms(wanted.ttl), str(wanted.limit))
    return script_call("leave", keys, words, (Part("next_slot"),) if wanted.limit else (_NEXT,))


def give_back_call(wanted: LeaseRequest, ticket: str, message: str) -> ScriptCall:
    """Return the call that gives back the turn of a message."""
    line, waiting, _ = line_keys(wanted.base, wanted.digest)
    return script_call("give_back", (line, waiting, wanted.lock), (ticket, message))


def revoke_call(base: str, lock: str, slots: str, starts: str, fence: int, history: int | None) -> ScriptCall:
    """Return the call that takes a lock from its holder, or from the lease with this fence alone."""
    parts = [*oldest_parts(slots), *([Part("starts", (starts,))] if starts else [])]
    if history is not None:
        parts += [Part("recorded", record_keys(base), (str(history),)), _ENTRY, Part("logged")]
    return script_call("revoke", (lock, *task_keys(base)), (ms(REVOKED_TTL), str(fence) if fence else ""), parts)


def sweep_call(base: str, history: int) -> ScriptCall:
    """Return the call that counts leases that have expired. A full or read-only server refuses it, and is read all the same."""
    call = script_call("sweep", record_keys(base), (str(history),), _SWEPT)
    call.optional = True
    return call


def page_call(base: str, cursor: str, count: str) -> ScriptCall:
    """Return the call that reads a part of the registry."""
    return script_call("page", record_keys(base)[:1], (cursor, count, base))


def renewal_call(leases: Sequence[LeaseRequest]) -> ScriptCall:
    """Return the call that renews leases."""
    keys = [key for one in leases for key in (_lock(one), one.attempt, f"{one.base}:revoked", f"{one.base}:registry")]
    parts = [_ENTRY, *([Part("limit")] if any(one.limit for one in leases) else [])]
    if any(one.stoppable for one in leases):
        parts.append(Part("stop", (), ("".join(str(int(one.stoppable)) for one in leases),)))
    return script_call("renew", keys, [word for one in leases for word in (one.token, ms(one.ttl))], parts)


def _lock(wanted: LeaseRequest) -> str:
    """Return the key of the lock; where only the token is known, the attempt key, which names it."""
    return wanted.attempt if wanted.by_token else wanted.lock


def _number(copy: float) -> str:
    return f"{copy:.6f}"


def ms(seconds: float) -> str:
    """Return whole milliseconds."""
    return str(int(seconds * 1000))
