"""The filesystem transport of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kombu import Connection

from tests.interplay import whole_files

pytestmark = pytest.mark.harness


class ReadTooEarly:
    """A message whose queue is read while the message is being written."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.found: Any = None

    def __json__(self) -> str:
        try:
            self.found = self.channel._get("jobs")
        except (Empty, ValueError) as error:
            self.found = error
        return "whole"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    """A connection by the transport of these tests."""
    options = {"data_folder_in": f"{tmp_path}", "data_folder_out": f"{tmp_path}"}
    with Connection(transport=whole_files.Transport, transport_options=options) as connection:
        yield connection


def test_a_message_is_read_only_once_it_is_written(connection: Connection) -> None:
    """A reader finds no message before it is whole, and then finds it."""
    channel = connection.default_channel
    message = ReadTooEarly(channel)
    channel._put("jobs", message)
    assert isinstance(message.found, Empty)
    assert channel._get("jobs") == "whole"
