"""Signals that tell what happens to locks.

The sender is the task. A receiver that fails is logged by Celery and never hurts a lock. `lock_lost`, `lock_renewed` and the
`store_error` of a renewal are sent from a thread of their own, in gevent and eventlet workers from a greenlet; the others from
where the task runs.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: ``lease``: a body is about to start under this lease.
lock_acquired = Signal(name="lock_acquired", providing_args={"lease"})

#: ``lease``: the body is over and its lease has been given back. Not sent where the store could not be reached then, nor of a
#: lease that had been lost.
lock_released = Signal(name="lock_released", providing_args={"lease"})

#: ``lease``: its expiry was put off.
lock_renewed = Signal(name="lock_renewed", providing_args={"lease"})

#: ``lease``: it ended while its body still went on. Sent once for a lease.
lock_lost = Signal(name="lock_lost", providing_args={"lease"})

#: ``key``, ``task_id``, ``holder``, ``policy``: a duplicate was met, and this policy decides. Sent once per decision.
duplicate = Signal(name="duplicate", providing_args={"key", "task_id", "holder", "policy"})

#: ``key``, ``task_id``, ``error``: the store did not answer, or refused.
store_error = Signal(name="store_error", providing_args={"key", "task_id", "error"})
