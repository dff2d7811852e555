"""Threads of the test process that record in the ledger: leases in the store, the store's commands, deaths."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha1
from itertools import combinations, product
from typing import NamedTuple

import redis

from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import LINE_TOKEN
from celery_singleton_lock.store.redis.calls import (
    ScriptCall,
    acquire_call,
    give_back_call,
    leave_call,
    reacquire_call,
    release_call,
    renewal_call,
    revoke_call,
    sweep_call,
)
from celery_singleton_lock.store.redis.scripts import script
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.faults.ledger import Ledger, name_of, now

_ERRORS = (redis.RedisError, OSError)

#: The verbs whose scripts depend on no request, with the features that a call may use.
SMALL: dict[str, tuple[str, ...]] = {
    "check": (),
    "page": (),
    "count": (),
    "pause": (),
    "holder": ("limit",),
}
#: What requests say of a line, as far as their scripts differ by it.
PLACES = (None, Place(), Place(stop=True), Place(quiet=1.0, max_quiet=2.0))
#: First part of the token of a reservation, which belongs to a message that no worker has started.
RESERVED = "queued:"


@contextlib.contextmanager
def _told(ledger: Ledger) -> Iterator[None]:
    """Record an error that ends a probe."""
    try:
        yield
    except BaseException as error:
        ledger.note("probe ended", error=repr(error))
        raise


class Watching(ABC, threading.Thread):
    """A thread that repeats one step until it is closed, also while the server is unreachable.

    Any other error ends the thread; then it is not ``sound`` when it is closed.
    """

    def __init__(self, ledger: Ledger, every: float) -> None:
        super().__init__(daemon=True)
        self.ledger = ledger
        self._every = every
        self._end = threading.Event()
        self.sound = False

    @abstractmethod
    def step(self) -> None:
        """Poll once."""

    def run(self) -> None:
        with _told(self.ledger):
            while not self._end.wait(self._every):
                with contextlib.suppress(*_ERRORS):
                    self.step()

    def close(self) -> None:
        """End the thread, and poll a last time."""
        if not self._end.is_set():
            self.sound = self.is_alive()
        self._end.set()
        self.join(10)
        with contextlib.suppress(*_ERRORS):
            self.step()


class Keys(Watching):
    """Records when a lease appears in the store and when it disappears; an outage counts as neither, a reservation is none."""

    def __init__(self, ledger: Ledger, url: str) -> None:
        super().__init__(ledger, 0.03)
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=0.5)
        self._there: dict[str, str] = {}

    def step(self) -> None:
        at = now()
        tokens = {key: self._token(str(key)) for key in self._client.keys("*:lock:*")}
        there = {name_of(token): key for key, token in tokens.items() if token and not token.startswith(RESERVED)}
        for run in self._there.keys() - there.keys():
            self.ledger.note("gone", run=run, key=self._there[run])
        for run in there.keys() - self._there.keys():
            self.ledger.note("key", at, run=run, key=there[run])
        self._there = there

    def _token(self, key: str) -> str:
        return str(self._client.hget(key, "token") or "")

    def close(self) -> None:
        super().close()
        self.ledger.note("looked")
        self._client.close()


class Deaths(Watching):
    """Records the end of each process in which a body has started."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, 0.02)
        self._handles: dict[int, int] = {}
        self._count = 0  # of the starts that it has seen

    def step(self) -> None:
        new = self.ledger.events("start")[self._count :]
        self._count += len(new)
        # In a long run, another process may have the number of a dead one.
        for pid in {event["pid"] for event in new} - set(self._handles.values()):
            try:
                self._handles[os.pidfd_open(pid)] = pid
            except OSError:
                self.ledger.note("death", of=pid)
        ready, _, _ = select.select(list(self._handles), [], [], 0)
        for handle in ready:
            os.close(handle)
            self.ledger.note("death", of=self._handles.pop(handle))

    def close(self) -> None:
        super().close()
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()


class Script(NamedTuple):
    """What a script does, and its text."""

    verb: str
    in_line: bool = False  # an acquire that may take over the reservation of the head of the line
    text: str = ""

    def policy(self, args: Sequence[str]) -> str:
        """Return the policy that an acquire names when its message comes for the first time."""
        place = re.search(r"local policy = ARGV\[#ARGV - (\d+)\]", self.text)
        return args[len(args) - 1 - int(place[1])] if place else ""


@dataclass
class Call:
    """The script call whose commands are read."""

    script: Script
    args: Sequence[str]
    token: str = ""  # that the lock has now, if it is kept at its release
    replaced: str = ""  # token of the reservation that a newcomer takes away
    superseded: str = ""  # the ticket that is about to be replaced in line
    left: tuple[float, str, str] | None = None  # time, lock and ticket that has left the line; it may be about to start
    started: str = ""  # the ticket whose message starts
    new: bool = False  # the lock has a new owner


class Commands(threading.Thread):
    """Records, with MONITOR, every call of a script and the changes that it made to a lock or a line.

    An error that is not the server's ends it. It is not ``sound`` after such an error, or if it missed commands.
    """

    def __init__(self, ledger: Ledger, url: str) -> None:
        super().__init__(daemon=True)
        self.ledger = ledger
        self._url = url
        self._end = False
        self._scripts = dict(scripts())
        self._call: Call | None = None
        self._lock = ""
        self._marker = secrets.token_hex(8)
        self._heard = threading.Event()
        self.ready = threading.Event()
        self.sound = False

    def run(self) -> None:
        with _told(self.ledger):
            while not self._end:
                with contextlib.suppress(*_ERRORS):
                    for line in self._lines():
                        self._read(line)
                self.ready.clear()
                self.ledger.note("store reset")
                time.sleep(0.05)

    def _lines(self) -> Iterator[str]:
        client = redis.Redis.from_url(
            self._url, socket_timeout=None
        )  # redis-py 8 has 5 s by default, less than a pause
        with contextlib.closing(client), client.monitor() as monitor:
            self.ready.set()
            while not self._end:
                yield monitor.connection.read_response().decode()

    def close(self) -> None:
        """End the thread after it has read all earlier commands."""
        if self._end:
            return
        heard = self._hears()
        self.sound = heard and self.is_alive()
        self._end = True
        with contextlib.suppress(*_ERRORS):
            self._say("over")
        self.join(5)

    def _hears(self) -> bool:
        """Tell whether MONITOR shows a marker that was sent to the server; the probe may be reconnecting."""
        deadline = now() + 15
        while not self._heard.is_set() and self.is_alive() and now() < deadline:
            with contextlib.suppress(*_ERRORS):
                self._say(self._marker)
            self._heard.wait(0.2)
        return self._heard.is_set()

    def _say(self, word: str) -> None:
        with contextlib.closing(redis.Redis.from_url(self._url, socket_timeout=1)) as client:
            client.echo(word)

    def _read(self, line: str) -> None:
        at, _, rest = line.partition(" ")
        words = [_plain(word) for word in re.findall(r'"((?:[^"\\]|\\.)*)"', rest)]
        if not words:
            return
        moment = float(at) + _offset()  # computed for each line, because the wall clock may be set
        if " lua]" in rest:
            if self._call is not None and len(words) > 1:
                self._inside(moment, words, self._call)
            return
        self._lapse()
        if words[0].upper() in ("EVALSHA", "EVAL"):
            self._outside(moment, words)
        else:
            self._call = None
            if words[1:] == [self._marker]:
                self._heard.set()

    def _outside(self, at: float, words: list[str]) -> None:
        digest = words[1] if words[0].upper() == "EVALSHA" else sha1(words[1].encode()).hexdigest()
        count = int(words[2])
        keys, args = words[3 : 3 + count], words[3 + count :]
        self._call = Call(self._scripts.get(digest, Script("?")), args)
        verb = self._call.script.verb
        if verb == "?":
            self.ledger.note("unknown script", at, digest=digest)
        if verb == "renew":
            for index, token in enumerate(args[: count // 2 : 2]):
                # A main process only knows the token, and passes the attempt key for both keys.
                own = keys[4 * index] != keys[4 * index + 1]
                run = name_of(token)
                self.ledger.note("store", at, verb="renew", run=run, key="", does=[], sent=True, own=own)
        elif verb in ("acquire", "reacquire", "release"):
            policy = self._call.script.policy(args)
            self.ledger.note(
                "store", at, verb=verb, run=name_of(args[0]), key=keys[0], does=[], sent=True, policy=policy
            )

    def _inside(self, at: float, words: list[str], call: Call) -> None:
        """Record a command of the script that was called last."""
        command, key, verb = words[0].upper(), words[1], call.script.verb
        if ":line:" in key:
            self._in_line(at, words, call)
        elif ":waiting:" in key and command == "HSET":
            self._on_text(at, words, call)
        elif key.endswith(":replaced") and command == "ZADD":
            call.replaced = words[3]
        elif key.endswith(":used") and command == "ZADD" and verb == "acquire":
            self._use(words, call)
        elif ":lock:" in key and command in ("PEXPIRE", "DEL", "HSET"):
            self._on_lock(at, words, call)
        elif verb == "renew" and command == "PEXPIRE" and ":attempt:" in key:
            self._did(at, call, key.rpartition(":attempt:")[2], self._lock, "renew", float(words[2]) / 1000)

    def _on_lock(self, at: float, words: list[str], call: Call) -> None:
        """Record a change of a lock: its owner is the token that acquired it, a reservation's included."""
        command, key, verb, args = words[0].upper(), words[1], call.script.verb, call.args
        ttl = float(words[2]) / 1000 if command == "PEXPIRE" else 0.0
        call.new = call.new or (command == "HSET" and "token" in words)
        if verb == "renew" and command == "PEXPIRE":
            self._lock = key
        elif verb == "acquire" and command == "HSET" and "token" in words:
            call.token = words[words.index("token") + 1]  # of another message, if the call names one
        elif verb in ("acquire", "reacquire") and command == "PEXPIRE":
            self._lapse()
            self._did(at, call, call.token or args[0], key, "take", ttl)
        elif verb == "acquire" and command == "DEL":
            self._did(at, call, call.replaced or f"{RESERVED}{args[2]}", key, "free")
        elif verb == "release" and command == "HSET" and "token" in words:
            self._did(at, call, args[0], key, "free")
            call.token = words[words.index("token") + 1]
        elif verb == "release" and command == "PEXPIRE":
            self._did(at, call, call.token, key, "take", ttl)
        elif verb == "release" and command == "DEL":
            self._did(at, call, args[0], key, "free")
        elif verb in ("leave", "give_back") and command != "HSET":
            self._did(at, call, f"{RESERVED}line", key, "renew" if command == "PEXPIRE" else "free", ttl)
        elif verb == "revoke" and command == "DEL":  # by an operator, from any holder
            self.ledger.note("store", at, verb=verb, run="", key=key, does=["unlock"])

    def _did(self, at: float, call: Call, token: str, key: str, does: str, ttl: float = 0.0) -> None:
        more: dict[str, object] = {"new": True} if does == "take" and call.new else {}
        if not token or token.startswith(RESERVED):
            more["reserved"] = True
        if does == "take" and call.script.verb == "acquire":
            own = name_of(f"{RESERVED}{call.args[2]}")
            with_line = call.script.in_line
            more["heir_of"] = [own, *([name_of(f"{RESERVED}line")] if with_line else [])]  # whose lock it may take over
            if with_line and "reserved" not in more:
                more["ticket"] = call.started
        self.ledger.note("store", at, verb=call.script.verb, run=name_of(token), key=key, does=[does], ttl=ttl, **more)

    # -- lines -------------------------------------------------------------------------------------

    def _in_line(self, at: float, words: list[str], call: Call) -> None:
        """Record that a message joins a line, or leaves it."""
        command, lock = words[0].upper(), words[1].replace(":line:", ":lock:")
        if command == "ZADD":
            self._lapse()
            self._note_line(at, "join", lock, words[3], task_id=call.args[2])
        elif command == "ZREM":
            self._lapse()
            if call.script.verb == "leave":
                self._note_line(at, "leave", lock, words[2])
            elif words[2] == call.superseded:
                self._note_line(at, "superseded", lock, words[2])
            else:
                call.left = at, lock, words[2]

    def _on_text(self, at: float, words: list[str], call: Call) -> None:
        """Record that a message of a line is published, as its turn has come: its text is taken out of the store."""
        *_, field, text = words
        if field.endswith(":message") and not text and (len(words) == 6 or call.args[0] == f"{RESERVED}line"):
            self._note_line(at, "turn", words[1].replace(":waiting:", ":lock:"), field.removesuffix(":message"))

    def _use(self, words: list[str], call: Call) -> None:
        """Read which message starts, or is about to leave the line because another takes its place."""
        if words[5].endswith(":superseded"):
            call.superseded = words[3]
        else:
            call.started = words[3]
            if call.left and call.left[2] == call.started:
                call.left = None

    def _lapse(self) -> None:
        """Record that the message that left the line last has lost its place, as its copy did not come in time."""
        if self._call is not None and self._call.left is not None:
            self._note_line(self._call.left[0], "lapse", *self._call.left[1:])
            self._call.left = None

    def _note_line(self, at: float, does: str, key: str, ticket: str, **more: object) -> None:
        self.ledger.note("line", at, does=does, key=key, ticket=ticket, **more)


def _offset() -> float:
    """Return the offset from the wall clock to ours; a reading that a busy machine interrupted is repeated."""
    while True:
        before, wall, after = now(), time.time(), now()
        if after - before < 0.002:
            return before - wall


@cache
def scripts() -> dict[str, Script]:
    """Return all scripts that a store can send, by digest: those of calls for each kind of request, with and without records."""
    found = {}
    for request, history in product(_requests(), (None, 9)):
        calls = {
            "acquire": [acquire_call(request, history, grace) for grace in (False, True)],
            "reacquire": [reacquire_call(request, 1, history)],
            "release": [
                release_call(replace(request, is_continued=continued), True, kept, history)
                for kept, continued in product((None, AfterRelease("cooldown", 1.0)), (False, True))
            ],
            "renew": [renewal_call([request])],
            "leave": [leave_call(request, "")],
            "give_back": [give_back_call(request, "", "")],
        }
        found.update({one.digest: _script(verb, request, one) for verb, some in calls.items() for one in some})
    for slots, starts, history in product(("", "slots"), ("", "starts"), (None, 9)):
        one = revoke_call("", "", slots, starts, 0, history)
        found[one.digest] = Script("revoke", text=one.script)
    swept = sweep_call("", 9)
    found[swept.digest] = Script("sweep", text=swept.script)
    for verb, features in SMALL.items():
        for chosen in (chosen for count in range(len(features) + 1) for chosen in combinations(features, count)):
            text, digest, _ = script(verb, frozenset(chosen))
            found[digest] = Script(verb, text=text)
    return found


def digests(verb: str) -> list[bytes]:
    """Return what a call of this verb contains one of."""
    return [digest.encode() for digest, one in scripts().items() if one.verb == verb]


def _script(verb: str, request: LeaseSpec, call: ScriptCall) -> Script:
    return Script(verb, verb == "acquire" and request.place is not None, call.script)


def _requests() -> list[LeaseSpec]:
    """Return a request of each kind that has a script of its own."""
    counts: tuple[MaxStarts | None, ...] = (None, MaxStarts(1), MaxStarts(1, count="unsuccessful"))
    owners = ((False, ""), (True, ""), (True, LINE_TOKEN))
    return [
        LeaseSpec(
            "",
            "1",
            token,
            1.0,
            limit=limit,
            queued=queued,
            max_starts=starts,
            place=place,
            stoppable=stop,
            comes_again=late,
        )
        for limit, (queued, token), starts, place, stop, late in product(
            (0, 2), owners, counts, PLACES, (False, True), (False, True)
        )
    ]


def _plain(word: str) -> str:
    """Return a word without MONITOR's quoting."""
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), word)
