"""Remote control: the commands that workers know for each other and for operators, and how workers are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Commands of `worker.control`: which tasks a worker runs under locks; to terminate a task that a newer message replaces.
LOCKS, REPLACE = "singleton_locks", "singleton_replace"
#: Answer of a worker whose pool cannot terminate tasks.
CANNOT_TERMINATE = "the pool cannot terminate tasks"
#: Seconds in which a Redis that is the broker must answer: unless Celery's transport options say so, Kombu waits for ever.
_BROKER_TIMEOUT = 3.0


def ask(
    app: Any,
    command: str,
    nodes: Sequence[str],
    timeout: float,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return the answers that worker nodes give within `timeout` seconds: of each a mapping from its name to what it says.

    Not with a connection of Celery's pool: after a question without an answer, its channel still polls. A main process forks
    children, and Kombu has each of them close the pool of its parent, where it waits for the answer to that poll.

    Raises:
        Exception: the broker could not be reached; of which class, depends on the transport.
    """
    with app.connection_for_write() as connection:
        if connection.transport.driver_type == "redis":
            bounds = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), _BROKER_TIMEOUT)
            connection.transport_options = {**bounds, **connection.transport_options}
        connection.ensure_connection(max_retries=1, interval_start=0)
        answers = app.control.broadcast(
            command, arguments, list(nodes), connection=connection, reply=True, timeout=timeout, **options
        )
    return list(answers or ())
