"""Celery's event stream, received while a block runs."""

from __future__ import annotations

import threading

from celery import Celery

from tests.integration.recorder import Event
from tests.servers import until


class EventStream:
    """Collects the events that workers started with ``-E`` send."""

    def __init__(self, app: Celery) -> None:
        self.events: list[Event] = []
        self._app = app
        self._connection = app.connection_for_read()
        self._receiver = app.events.Receiver(self._connection, handlers={"*": self.events.append})
        capture = {"limit": None, "timeout": None, "wakeup": False}
        self._thread = threading.Thread(target=self._receiver.capture, kwargs=capture, daemon=True)

    def __enter__(self) -> EventStream:
        self._thread.start()
        # A ready consumer is not enough, because Redis subscribes later. Only a received event proves it.
        with self._app.connection_for_write() as connection, self._app.events.Dispatcher(connection) as dispatcher:
            until(lambda: self.events or dispatcher.send("test-poke"), "the event stream flows", every=0.1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(10)
        self._connection.release()
