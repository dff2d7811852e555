"""The store in the memory of one process."""

from celery_singleton_lock.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
