"""Memory that a prefork worker's main process shares with its children: each writes there which lease it has.

A child that keeps the GIL cannot answer, and a store that has lost its data cannot either. Here the main process reads which
lease each child counts on.
"""

from __future__ import annotations

import mmap

SLOTS = 4096  # children of one worker at most; further ones are not watched over
_TOKEN = _DIGEST = 32  # hex digits
_SIZE = _TOKEN + _DIGEST


class Board:
    """To be made before the children are forked.

    Attributes:
        slot: where this process writes: its number among the children, or None.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SLOTS * _SIZE)
        self.slot: int | None = None

    def hold(self, token: str, digest: str) -> None:
        """This process has the lease of this token, on the lock of this digest."""
        if self.slot is not None and self.slot < SLOTS:
            at = self.slot * _SIZE
            self._memory[at + _TOKEN : at + _SIZE] = digest.encode()
            self._memory[at : at + _TOKEN] = token.encode()  # last: it vouches for the digest

    def let_go(self, token: str) -> None:
        """This process has it no more, or is about to give it back."""
        if self.slot is not None and self.slot < SLOTS:
            at = self.slot * _SIZE
            if self._memory[at : at + _TOKEN] == token.encode():
                self._memory[at : at + _TOKEN] = bytes(_TOKEN)

    def digest(self, token: str) -> str:
        """Of the lock on which a child has the lease of this token; empty: none has."""
        at = self._memory.find(token.encode())
        return "" if at < 0 else self._memory[at + _TOKEN : at + _SIZE].decode()
