"""Memory that a prefork worker's main process shares with its children: each writes there which lease it has.

A child that keeps the GIL cannot answer, and a store that has lost its data cannot either. The main process reads here whether a
lease that is gone from the store is one that its child still counts on.
"""

from __future__ import annotations

import mmap
import os

SLOTS = 4096  # of one cache line each; children whose pids meet in one overwrite each other, and are then not found
_TOKEN = _DIGEST = 32  # hex digits
_SIZE = _TOKEN + _DIGEST


class Board:
    """A slot for each child, found by its pid. To be made before the children are forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SLOTS * _SIZE)

    def hold(self, token: str, digest: str) -> None:
        """This process has the lease of this token, on the lock of this digest."""
        at = _place(os.getpid())
        self._memory[at + _TOKEN : at + _SIZE] = digest.encode()
        self._memory[at : at + _TOKEN] = token.encode()  # last: it vouches for the digest

    def let_go(self, token: str) -> None:
        """This process has it no more, or is about to give it back."""
        at = _place(os.getpid())
        if self._memory[at : at + _TOKEN] == token.encode():
            self._memory[at : at + _TOKEN] = bytes(_TOKEN)

    def digest(self, pid: int, token: str) -> str:
        """Of which lock a process has the lease with this token; empty: it has not."""
        at = _place(pid)
        slot = self._memory[at : at + _SIZE]
        return slot[_TOKEN:].decode() if slot[:_TOKEN] == token.encode() else ""


def _place(pid: int) -> int:
    return pid % SLOTS * _SIZE
