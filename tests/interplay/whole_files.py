"""Kombu's filesystem transport, mended in one place: a message can be read only once it has been written.

Kombu (5.7) opens a message's file under its final name and then writes it. A worker that looks for messages in between takes
the empty file: the message is lost, and the worker ends with a JSONDecodeError. It does so with plain tasks too. These tests
are about duplicates, and cannot ask for more than the broker holds.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from time import monotonic
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """Writes a message under a name that no worker reads, and renames the file."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        # The final name as Kombu has it: messages are read in the order of their names.
        path = Path(self.data_folder_out, f"{round(monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg")
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(dumps(payload), encoding="utf-8")
        unfinished.rename(path)


class Transport(filesystem.Transport):
    """What URLs with ``filesystem://`` mean in these tests."""

    Channel = Channel


def use() -> None:
    """Let ``filesystem://`` mean this transport in the calling process."""
    TRANSPORT_ALIASES["filesystem"] = f"{__name__}:Transport"
