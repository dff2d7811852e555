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
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path

import redis

import celery_singleton_lock
from tests.faults.ledger import Ledger, name_of, now

_ERRORS = (redis.RedisError, OSError)


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
    """Records when a lease appears in the store and when it disappears; an outage counts as neither."""

    def __init__(self, ledger: Ledger, url: str) -> None:
        super().__init__(ledger, 0.03)
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=0.5)
        self._there: dict[str, str] = {}

    def step(self) -> None:
        at = now()
        there = {name_of(token): key for key in self._client.keys("*:lock:*") if (token := self._token(str(key)))}
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
        self._known: set[int] = set()

    def step(self) -> None:
        for pid in {event["pid"] for event in self.ledger.events("start")} - self._known:
            self._known.add(pid)
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


class Commands(threading.Thread):
    """Records, with MONITOR, every call of a script and the changes that it made to a lock.

    An error that is not the server's ends it. It is not ``sound`` after such an error, or if it missed commands.
    """

    def __init__(self, ledger: Ledger, url: str) -> None:
        super().__init__(daemon=True)
        self.ledger = ledger
        self._url = url
        self._end = False
        self._verbs = _verbs()
        self._call: dict[str, object] | None = None
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
            self._inside(moment, words)
        elif words[0].upper() in ("EVALSHA", "EVAL"):
            self._outside(moment, words)
        else:
            self._call = None
            if words[1:] == [self._marker]:
                self._heard.set()

    def _outside(self, at: float, words: list[str]) -> None:
        digest = words[1] if words[0].upper() == "EVALSHA" else sha1(words[1].encode()).hexdigest()
        count = int(words[2])
        keys, args = words[3 : 3 + count], words[3 + count :]
        self._call = {"verb": self._verbs.get(digest, "?"), "args": args}
        if digest not in self._verbs:
            self.ledger.note("unknown script", at, digest=digest)
        if self._call["verb"] == "renew":
            for index, token in enumerate(args[::2]):
                # A main process only knows the token, and passes the attempt key for both keys.
                own = keys[3 * index] != keys[3 * index + 1]
                run = name_of(token)
                self.ledger.note("store", at, verb="renew", run=run, key="", does=[], sent=True, own=own)
        elif self._call["verb"] in ("acquire", "reacquire", "release"):
            self.ledger.note(
                "store", at, verb=self._call["verb"], run=name_of(args[0]), key=keys[0], does=[], sent=True
            )

    def _inside(self, at: float, words: list[str]) -> None:
        """Record a command of the script that was called last."""
        if self._call is None:
            return
        verb, args, command = self._call["verb"], self._call["args"], words[0].upper()
        assert isinstance(args, list)
        if verb == "renew" and command == "PEXPIRE":
            if ":attempt:" not in words[1]:
                self._lock = words[1]
            else:
                self._did(at, verb, words[1].rpartition(":attempt:")[2], self._lock, "renew", float(words[2]) / 1000)
        elif verb in ("acquire", "reacquire") and command == "PEXPIRE" and not words[1].endswith(":recent"):
            self._did(at, verb, args[0], words[1], "take", float(words[2]) / 1000)
        elif verb == "release" and command == "DEL":
            self._did(at, verb, args[0], words[1], "free")
        elif verb == "revoke" and command == "DEL":  # by an operator, from any holder
            self.ledger.note("store", at, verb=verb, run="", key=words[1], does=["unlock"])

    def _did(self, at: float, verb: object, token: str, key: str, does: str, ttl: float = 0.0) -> None:
        self.ledger.note("store", at, verb=verb, run=name_of(token), key=key, does=[does], ttl=ttl)


def _offset() -> float:
    """Return the offset from the wall clock to ours; a reading that a busy machine interrupted is repeated."""
    while True:
        before, wall, after = now(), time.time(), now()
        if after - before < 0.002:
            return before - wall


def _verbs() -> dict[str, str]:
    scripts = Path(celery_singleton_lock.__file__).parent / "store" / "redis"
    return {sha1(path.read_bytes()).hexdigest(): path.stem for path in scripts.glob("*.lua")}


def _plain(word: str) -> str:
    """Return a word without MONITOR's quoting."""
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), word)
