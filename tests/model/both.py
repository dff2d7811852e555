"""A world whose store is two: the one in memory, and the scripts on Redis, which must answer each call alike."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery_singleton_lock.store.memory import MemoryStore
from tests.contract.clocked import ClockedRedisStore
from tests.contract.sequences import BEGINNING, rounded
from tests.model.world import Clock, World

#: Seconds that each call takes: on Redis, messages that join in the same moment have no order.
TICK = 0.125


class BothStores:
    """The two stores. What begins with an underscore is that of the store in memory."""

    def __init__(self, clock: Clock, on_redis: ClockedRedisStore) -> None:
        self._clock = clock
        self._memory = MemoryStore(clock=clock)
        self.on_redis = on_redis

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name) if name.startswith("_") else partial(self._call, name)

    def _call(self, verb: str, *arguments: Any) -> Any:
        self._clock.time += TICK
        self.on_redis.set_time(self._clock.time)
        answer = getattr(self._memory, verb)(*arguments)
        other = getattr(self.on_redis, verb)(*arguments)
        assert rounded(answer) == rounded(other), f"{verb} is answered {answer} in memory, {other} on Redis"
        return answer


class WorldOnBoth(World):
    """A world with both stores. It cannot be copied, so it can only be walked through."""

    def _lose_data(self, place: int) -> None:
        super()._lose_data(place)
        self.store.on_redis.lose()


def world_on_both(on_redis: ClockedRedisStore, **options: Any) -> World:
    """Return a world at its beginning, with an empty store on Redis."""
    clock = Clock(BEGINNING)
    on_redis.lose()
    return WorldOnBoth(clock=clock, store=BothStores(clock, on_redis), **options)
