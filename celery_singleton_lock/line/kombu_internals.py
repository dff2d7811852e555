"""Every private name of Kombu that this library touches: each is there in Kombu 5.3 to 5.7.

`tests/unit/test_celery_internals.py` says which one is gone, and what it was for.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import virtual

_QoS: Any = virtual.QoS  # untyped in Kombu


def restore(message: Any) -> None:
    """Return a message to the end of a Redis queue from which the next one is taken, in one step.

    Kombu's `reject` (5.7) puts it behind all others. Nothing is deleted after that step: another worker may have the
    message by then, under the same tag.

    Raises:
        LookupError: no queue takes it.
        Exception: of Redis.
    """
    channel, tag, info = message.channel, message.delivery_tag, message.delivery_info
    with channel.conn_or_acquire() as client, client.pipeline() as pipe:
        channel._do_restore_message(message._raw, info["exchange"], info["routing_key"], pipe)
        if not len(pipe):  # Kombu has logged why
            raise LookupError("no queue takes the message")
        channel.qos._remove_from_indices(tag, pipe)
        pipe.execute()
    _QoS.ack(channel.qos, tag)  # in this process alone
