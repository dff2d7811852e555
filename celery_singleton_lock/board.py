"""Memory that a prefork worker's main process shares with its children: each writes there which lease it has.

A child that keeps the GIL cannot answer, and a store that has lost its data cannot either. Here the main process reads which
lease each child counts on.
"""

from __future__ import annotations

import mmap
import os

SLOTS = 4096  # children of one worker that can write; of others it is not known what they have
_PID, _TOKEN, _DIGEST = 16, 32, 32  # bytes; the last two are hex digits
_HELD = _PID + _TOKEN
_GIVEN_UP = _HELD + _DIGEST
_SIZE = _GIVEN_UP + _TOKEN
_NOTHING = bytes(_TOKEN)


class Board:
    """To be made before the children are forked. Each process writes a slot of its own."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SLOTS * _SIZE)
        self._at: int | None = None
        self._pid = 0  # of the process that writes

    def join(self, number: int | None) -> None:
        """Write from now on, as this child.

        Arguments:
            number: among those that live at the same time; None: this process is no child. One that a child has forked, and that
                has its number, does not write.
        """
        of_a_child, self._at = self._pid not in (0, os.getpid()), None  # which has its number, too
        if number is not None and number < SLOTS and not of_a_child:
            self._at, self._pid = number * _SIZE, os.getpid()
            self._write(0, _name(self._pid) + bytes(_SIZE - _PID))

    def hold(self, token: str, digest: str) -> None:
        """The body's thread has the lease of this token, on the lock of this digest."""
        at = self._at
        if at is not None:
            self._memory[at + _HELD : at + _GIVEN_UP] = digest.encode()
            self._memory[at + _PID : at + _HELD] = token.encode()  # last: it vouches for the digest

    def let_go(self) -> None:
        """It has none, or is about to give it back."""
        at = self._at
        if at is not None:
            self._memory[at + _PID : at + _HELD] = _NOTHING

    def give_up(self, token: str) -> None:
        """An operator took the lease of this token."""
        if self._at is not None:
            self._write(_GIVEN_UP, token.encode())

    def _write(self, part: int, text: bytes) -> None:
        assert self._at is not None
        self._memory[self._at + part : self._at + part + len(text)] = text

    def digest(self, pid: int, token: str) -> str | None:
        """Of the lock on which this child has the lease of this token; empty: it has not; None: it does not write here."""
        at = self._memory.find(_name(pid))
        if at < 0:
            return None
        slot, sought = self._memory[at : at + _SIZE], token.encode()  # read once: the child writes on
        has = slot[_PID:_HELD] == sought != slot[_GIVEN_UP:]
        return slot[_HELD:_GIVEN_UP].decode() if has else ""


def _name(pid: int) -> bytes:
    """How a child is found: by what is no hex digit."""
    return b"<%014d>" % pid
