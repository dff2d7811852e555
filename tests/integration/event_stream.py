"""Celery's event stream, received while a block runs."""

from __future__ import annotations

import threading

from tests.integration.environment import WorkerEnvironment
from tests.integration.recorder import Event
from tests.servers import until


class EventStream:
    """Collects the events that the environment's workers send, if they were started with ``-E``.

    Other workers of the run may have the same broker.
    """

    def __init__(self, env: WorkerEnvironment) -> None:
        self.events: list[Event] = []
        self._nodes = {node.hostname() for node in env.setup.worker_cluster}
        self._app = env.app
        self._connection = env.app.connection_for_read()
        self._flows = threading.Event()
        self._receiver = env.app.events.Receiver(self._connection, handlers={"*": self._receive})
        capture = {"limit": None, "timeout": None, "wakeup": False}
        self._thread = threading.Thread(target=self._receiver.capture, kwargs=capture, daemon=True)

    def _receive(self, event: Event) -> None:
        self._flows.set()
        if event["hostname"] in self._nodes:
            self.events.append(event)

    def __enter__(self) -> EventStream:
        self._thread.start()
        # A ready consumer is not enough, because Redis subscribes later. Only a received event proves it.
        with self._app.connection_for_write() as connection, self._app.events.Dispatcher(connection) as dispatcher:
            until(lambda: self._flows.is_set() or dispatcher.send("test-poke"), "the event stream flows", every=0.1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(60)
        self._connection.release()
