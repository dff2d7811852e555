"""Celery signals about locks. Their sender is the task.

Celery logs a receiver that fails; this never harms a lock. `lock_lost`, `lock_renewed` and the `store_error` of a renewal are
sent from a thread of their own (gevent, eventlet: from a greenlet), the others from where the task runs.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: ``lease``: the lock was acquired, and the body is about to start.
lock_acquired = Signal(name="lock_acquired", providing_args={"lease"})

#: ``lease``: the body has ended and its lock was released, or kept without it: for a cooldown (`lock_at_least`), or for an own
#: retry (``lock_from="publish"``). With ``lock_until="start"``, sent before the body. Not sent for a lost lease, nor if the
#: store was unreachable or the process of the body has died.
lock_released = Signal(name="lock_released", providing_args={"lease"})

#: ``lease``: the lease was renewed.
lock_renewed = Signal(name="lock_renewed", providing_args={"lease"})

#: ``lease``: the lease was lost while its body still ran, or the body is to stop under `Replace`. Sent once for each lease.
lock_lost = Signal(name="lock_lost", providing_args={"lease"})

#: ``key``, ``task_id``, ``holder``, ``policy``, ``pending``: this policy decides about a duplicate. Sent once for each decision,
#: but not for those about the delayed copies of a message, or one that follows its holder (`Join`).
#: ``pending``: the task id of the message in line that runs in place of the duplicate; else empty. Not sent again when a message
#: that waits ends because a newer one took its place: no policy decides then.
duplicate = Signal(name="duplicate", providing_args={"key", "task_id", "holder", "policy", "pending"})

#: ``key``, ``task_id``, ``error``: the store was unreachable, or refused a command, when a lock was to be acquired, released or
#: renewed. In one outage, a process sends it once for all its renewals.
store_error = Signal(name="store_error", providing_args={"key", "task_id", "error"})
