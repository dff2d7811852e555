"""The store in Redis or Valkey."""

from celery_singleton_lock.store.redis.store import RedisStore
from celery_singleton_lock.store.redis.url import connector

__all__ = ["RedisStore", "connector"]
