"""The logger of this library. It escapes control characters in ids and names, as they come with messages."""

from __future__ import annotations

import logging
from typing import Any


def _escaped(argument: Any) -> Any:
    if isinstance(argument, (int, float)):
        return argument
    try:
        text = str(argument)
    except Exception:  # logging reports it
        return argument
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _EscapeArguments(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_escaped(argument) for argument in record.args)
        return True


logger = logging.getLogger("celery_singleton_lock")
logger.addFilter(_EscapeArguments())
