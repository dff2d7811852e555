"""The least that a lock around a body takes in Python: key, token, two commands under a deadline, and a note of what is held."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from hashlib import blake2b

from celery_singleton_lock.stores import Claim

_FINE = (b"*1\r\n$7\r\ngranted\r\n", b":0\r\n")


class Least:
    """Takes and frees locks as this library does in a prefork child, by its scripts and keys, and does nothing beside that.

    It has no policies, renewal, lease, signals or errors of its own, and sends nothing twice.

    Arguments:
        port: of the store's server, on the loopback interface.
        commands: what one lock cycle of the library sends; the digests of its scripts are taken from there.
    """

    def __init__(self, port: int, commands: Sequence[Sequence[str]]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        acquire, release = (command[1] for command in commands)
        self._acquire = f"*12\r\n$7\r\nEVALSHA\r\n$40\r\n{acquire}\r\n$1\r\n3\r\n"
        self._release = f"*9\r\n$7\r\nEVALSHA\r\n$40\r\n{release}\r\n$1\r\n3\r\n"
        self._own = _packed("worker@host", str(os.getpid()), "1")
        self._success = _packed("1")
        self._held: dict[str, Claim] = {}

    def acquire(self, task_id: str, arguments: Sequence[object]) -> tuple[str, str]:
        """Take the lock of a call; answers token and words for its release."""
        token = os.urandom(16).hex()
        digest = blake2b(json.dumps(arguments).encode(), digest_size=16).hexdigest()
        claim = Claim("singleton:{benchmarks.least}", digest, token, 30.0, task_id)
        words = _packed(claim.lock, claim.attempt, claim.ended, token, "30000")
        self._ask(self._acquire + words + _packed(task_id) + self._own)
        self._held[token] = claim
        return token, words

    def release(self, token: str, words: str) -> None:
        """Free it."""
        del self._held[token]
        self._ask(self._release + words + self._success)

    def _ask(self, command: str) -> None:
        self._socket.settimeout(1.0)
        self._socket.sendall(command.encode())
        reply = self._socket.recv(4096)
        if reply not in _FINE:
            raise RuntimeError(f"the store answered {reply!r}")


def _packed(*words: str) -> str:
    return "".join([f"${len(word)}\r\n{word}\r\n" for word in words])
