"""Which errors of a test say that something took too long. Workers import `tests.stacks`, and not pytest."""

from __future__ import annotations

import subprocess

import celery.exceptions
import pytest

from tests.servers import NotInTime


def is_timeout(error: BaseException) -> bool:
    """Tell whether a test waited in vain, or pytest-timeout ended it."""
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith("Timeout")
    return isinstance(error, (NotInTime, TimeoutError, celery.exceptions.TimeoutError, subprocess.TimeoutExpired))
