"""The least that a lock around a body takes in Python: key, token, two commands under a deadline, and a note of what is held."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from hashlib import blake2b

from celery_singleton_lock.store.keys import pauses_key, record_keys, task_keys

BASE = "singleton:{benchmarks.least}"
_FINE = (b"*2\r\n$7\r\ngranted\r\n", b"*2\r\n:0\r\n")


class Least:
    """Takes and frees locks as this library does, by its scripts and keys, and does nothing beside that.

    It has no policies, renewal, lease, signals or errors of its own, and sends nothing twice. What does not change from
    task to task, lengths included, is made once.

    Arguments:
        port: of the store's server, on the loopback interface.
        commands: what one lock cycle of the library sends; the digests of its scripts are taken from there, and whether
            it wants the attempt key.
    """

    def __init__(self, port: int, commands: Sequence[Sequence[str]]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        acquire, release = commands
        self._acquire = f"*23\r\n$7\r\nEVALSHA\r\n$40\r\n{acquire[1]}\r\n$2\r\n10\r\n"
        self._release = f"*15\r\n$7\r\nEVALSHA\r\n$40\r\n{release[1]}\r\n$1\r\n6\r\n"
        self._own = _packed("worker@host", str(os.getpid()), *acquire[-5:])
        self._ended = _packed("1", "success", "", acquire[-1])
        sizes = {"lock": 32, "attempt": 32, "completed": 69}
        self._lengths = [len(f"{BASE}:{kind}:") + size for kind, size in sizes.items()]
        self._records = _packed(*record_keys(BASE))
        self._counters = _packed(*task_keys(BASE), pauses_key(BASE)) + self._records
        self._held: dict[str, str] = {}

    def acquire(self, task_id: str, arguments: Sequence[object]) -> tuple[str, str]:
        """Take the lock of a call; answers token and words for its release."""
        token = os.urandom(16).hex()
        digest = blake2b(json.dumps(arguments).encode(), digest_size=16).hexdigest()
        lock, attempt, completed = self._lengths
        keys = (
            f"${lock}\r\n{BASE}:lock:{digest}\r\n${attempt}\r\n{BASE}:attempt:{token}\r\n"
            f"${completed}\r\n{BASE}:completed:{digest}:{task_id}\r\n"
        )
        words = f"$32\r\n{token}\r\n$5\r\n30000\r\n"
        self._ask(f"{self._acquire}{keys}{self._counters}{words}$36\r\n{task_id}\r\n{self._own}")
        self._held[token] = digest
        return token, keys + self._records + words

    def release(self, token: str, words: str) -> None:
        """Free it."""
        del self._held[token]
        self._ask(f"{self._release}{words}{self._ended}")

    def _ask(self, command: str) -> None:
        self._socket.settimeout(1.0)
        self._socket.sendall(command.encode())
        reply = self._socket.recv(4096)
        if not reply.startswith(_FINE):
            raise RuntimeError(f"the store answered {reply!r}")


def _packed(*words: str) -> str:
    return "".join([f"${len(word)}\r\n{word}\r\n" for word in words])
