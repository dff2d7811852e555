"""The logger of this library. It escapes control characters in ids and names, as they come with messages.

Each record has the fields `task` (its name), `task_id`, `key` (the lock) and `holder` (who holds that instead: a dict as of
`Holder.as_dict`), for formatters that write JSON. A field that is not known, or does not apply, is empty; a holder is None then.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.texts import printable

_EMPTY = {"task": "", "task_id": "", "key": "", "holder": None}


def _escaped(argument: Any) -> Any:
    if isinstance(argument, (int, float)):
        return argument
    try:
        text = str(argument)
    except Exception:  # logging reports it
        return argument
    return printable(text)


class _Complete(logging.Filter):
    """Escapes arguments, and gives a record that is not about a task the same fields, empty."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__ = {**_EMPTY, **record.__dict__}
        if isinstance(record.args, tuple):
            record.args = tuple(_escaped(argument) for argument in record.args)
        return True


logger = logging.getLogger("celery_singleton_lock")
logger.addFilter(_Complete())


class TaskLog(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 knows no argument
    """Logs about one message of a task: each text begins with its name and task id, and shows the key, if need be at its end."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            fields: Any = dict(self.extra or {})
            fields["holder"] = fields["holder"] and fields["holder"].as_dict()
            text, key = f"Task %s[%s] {msg}", fields["key"]
            if key and not any(_shows(argument, key) for argument in args):
                text, args = f"{text}; key %s", (*args, key)
            self.logger.log(level, text, fields["task"], fields["task_id"], *args, extra=fields, stacklevel=2, **kwargs)


def _shows(argument: object, key: str) -> bool:
    """Tell whether an argument is a text with this key, or an error whose text has it."""
    text = argument if isinstance(argument, str) else getattr(argument, "key", "")
    return isinstance(text, str) and key in text


def about(task: Any, task_id: str, key: str = "", holder: Holder | None = None) -> TaskLog:
    """Return the log of a message.

    Arguments:
        task: the task, or its name.
        key: the lock that the message wants or has.
        holder: who holds that instead.
    """
    return TaskLog(logger, {"task": getattr(task, "name", task), "task_id": task_id, "key": key, "holder": holder})
