"""Parts of the library, taken out in a worker's process to see what each takes; what is left still takes locks and frees them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from celery_singleton_lock import guard
from celery_singleton_lock.keys import KeyPlan
from celery_singleton_lock.renewal import Renewer
from celery_singleton_lock.stores.redis import _KNOWN, RedisStore, _head

Replaced = list[tuple[Any, str, Any]]


class _NoLease:
    """What is needed to free a lock, and no more."""

    lost = owned = False
    interrupt = retaking = None
    due = math.inf

    def __init__(self, key: str, claim: Any = None, task: Any = None) -> None:
        self.key, self.claim, self.task = key, claim, task

    def granted(self, *_: Any) -> None:
        self.owned = True


def _form(plan: KeyPlan, args: Any, kwargs: Any) -> list[Any]:
    return [*args, kwargs]


def _run(store: Any, name: str, words: bytes, *_: Any) -> Any:
    sock = store._free[-1].connection._sock._sock  # the one used last: all take a lock before anything is taken out
    sock.settimeout(1.0)
    sock.sendall(_head("EVALSHA", name, 1) + words)
    return _KNOWN[sock.recv(4096)]


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _ask(runtime: Any, claim: Any) -> tuple[Any, float]:
    return runtime.store.acquire(claim), 0.0


_EACH: Mapping[str, Replaced] = {
    "names, defaults and types of arguments": [(KeyPlan, "form", _form)],
    "deadline, free connections, errors, sending again": [(RedisStore, "_run", _run)],
    "renewal, and the note for the main process": [(Renewer, "add", _nothing), (Renewer, "remove", _nothing)],
    "the lease that a body sees": [(guard, "Lease", _NoLease)],
    "signals, and how late a grant came": [(guard, "send", _nothing), (guard, "_acquire", _ask)],
}
#: What is taken out, by name.
ALL = "all of these"
CUTS: Mapping[str, Replaced] = {**_EACH, ALL: [one for several in _EACH.values() for one in several]}

_out = ExitStack()


def take_out(name: str) -> None:
    """From now on this process does without one of `CUTS`; empty: without none."""
    _out.close()
    for owner, attribute, replacement in CUTS.get(name, ()):
        _out.enter_context(patch.object(owner, attribute, replacement))
