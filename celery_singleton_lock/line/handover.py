"""Hands the next message in line from a process of a pool to the main process of its worker, which starts it without the broker.

That saves a publication and a delivery between the end of a holder and the next start (benchmarks, idle time). Nothing depends
on it: a message that is lost here comes with its delayed copy, as one does whose worker dies before it has begun.
A message that this worker should not start is published, as it is in other pools, where there is no such channel.
"""

from __future__ import annotations

import socket
from base64 import b64decode
from functools import partial
from inspect import signature
from typing import Any

from celery.worker import state as worker_state
from kombu.message import Message
from kombu.messaging import Producer
from kombu.serialization import dumps

from celery_singleton_lock.clock import now
from celery_singleton_lock.context import context_of
from celery_singleton_lock.line.dispatch import HAND_OVER, publish
from celery_singleton_lock.line.message import LineMessage
from celery_singleton_lock.log import logger
from celery_singleton_lock.renewal.loop import BackgroundLoop

_dumps: Any = dumps  # untyped in Kombu
#: Longest message, in bytes, that is handed over. Others are published. A datagram may not be much longer on Linux.
MAX_MESSAGE = 64 * 1024
#: Seconds after which a thread publishes what the event loop has not received.
LOOK_INTERVAL = 1.0
#: What `kombu.Producer.publish` takes besides the properties of a message.
_NO_PROPERTIES = {*signature(Producer.publish).parameters} - {"priority", "delivery_mode"}


class _LocalMessage(Message):
    """A message that no broker has delivered, so that none waits for its acknowledgement."""

    def ack(self, multiple: bool = False) -> None: ...

    def reject(self, requeue: bool = False) -> None: ...


class HandOver:
    """The channel from the processes of a pool to their main process. It is made before the pool forks, and found by its app.

    Each message is one datagram, so processes need not take turns. A full or closed channel refuses a message at once.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._inlet, self._outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._watch = BackgroundLoop(self._look, context_of(app).events.loop_failed)
        self._seen = ""
        app.__dict__[HAND_OVER] = self

    def offer(self, text: str) -> bool:
        """Hand over a message of the line; return whether that is done. Called in processes of the pool, too."""
        data = text.encode()
        if len(data) > MAX_MESSAGE:
            return False
        try:
            self._inlet.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def listen(self, consumer: Any, hub: Any) -> None:
        """Have the event loop start what comes. It forgets that when it begins anew, after a lost connection."""
        hub.add_reader(self._outlet.fileno(), self._receive, consumer)
        self._watch.wake(now() + LOOK_INTERVAL)

    def close(self, hub: Any) -> None:
        """Refuse messages from now on, and publish those that were not received yet."""
        self._app.__dict__.pop(HAND_OVER, None)
        self._watch.end()
        hub.remove(self._outlet.fileno())
        self._outlet.shutdown(socket.SHUT_RD)  # for processes of the pool, too
        self._publish_all()
        self._inlet.close()
        self._outlet.close()

    def _look(self) -> float:
        """In a thread, publish what the event loop did not receive between two looks: it is blocked, as in a soft shutdown."""
        if (text := self._read(socket.MSG_PEEK)) and text == self._seen:
            self._publish_all()
        self._seen = text
        return now() + LOOK_INTERVAL

    def _publish_all(self) -> None:
        while text := self._read():
            self._publish(text)

    def _read(self, flags: int = 0) -> str:
        """Return the next message, "" if there is none."""
        try:
            return self._outlet.recv(MAX_MESSAGE, socket.MSG_DONTWAIT | flags).decode()
        except OSError:  # or the channel is closed
            return ""

    def _receive(self, consumer: Any) -> None:
        if not (text := self._read()):
            return
        try:
            message, queue = _message_of(text, consumer)
            if _is_for(consumer, queue, message.headers["task"]):
                consumer.task_consumer.on_message(message)
            else:
                self._publish(text)
        except Exception:  # it may have begun, so its copy, which knows that, starts it
            logger.exception("could not start the next in line in its holder's worker")

    def _publish(self, text: str) -> None:
        """Have another thread publish a message: the event loop must not wait for the broker."""
        context_of(self._app).callbacks.call(partial(publish, self._app, text))


def _is_for(consumer: Any, queue: str, name: str) -> bool:
    """Tell whether this worker may start a message of this queue and task."""
    task = consumer.app.tasks.get(name)  # None: that of another worker, in one lock group
    # With acks_late the broker has to know the message, to deliver it again if the worker dies.
    return bool(task and not task.acks_late and consumer.task_consumer.consuming_from(queue) and not _is_busy())


def _is_busy() -> bool:
    """Tell whether messages wait in this worker for a process, whose turn it is then, or whether the worker is stopping."""
    is_stopping = any(one not in (None, False) for one in (worker_state.should_stop, worker_state.should_terminate))
    return is_stopping or len(worker_state.reserved_requests) > len(worker_state.active_requests)


def _message_of(text: str, consumer: Any) -> tuple[Message, str]:
    """Return a message as a broker would deliver it, and the name of its queue."""
    body, queue, options = LineMessage.of(text)[:3]
    if "content_type" in options:
        content_type, encoding, data = options["content_type"], options["content_encoding"], b64decode(body)
    else:
        content_type, encoding, data = _dumps(body, "json")
    message = _LocalMessage(  # type: ignore[no-untyped-call]
        data,
        content_type=content_type,
        content_encoding=encoding,
        delivery_info={"exchange": options["exchange"], "routing_key": options["routing_key"], "redelivered": False},
        properties={name: value for name, value in options.items() if name not in _NO_PROPERTIES},
        headers=options["headers"],
        accept=consumer.task_consumer.accept,
    )
    return message, queue or options["routing_key"]
