"""A store on Redis whose clock a test sets: exact to the microsecond, on any server, and nothing in it waits.

The library's own scripts run on the server. What stands before them takes the place of what reads the server's clock: `TIME`, and
the commands that set or tell when a key expires. The time comes with each call, and one key has when each other one expires. What
has expired is deleted before the script begins, and a command that is not known here is refused. (With libfaketime only some
servers start, and it stops no clock between two seconds.)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.redis.calls import ScriptCall

_CLOCK = """
local redis = (function(server, expiries, time)
  local now = math.floor(time / 1000)
  local known = {
    DEL = 1, EXISTS = 1, GET = 1, HDEL = 1, HGET = 1, HGETALL = 1, HINCRBY = 1, HMGET = 1, HSET = 1, LPUSH = 1, LRANGE = 1,
    LTRIM = 1, SADD = 1, SMEMBERS = 1, SREM = 1, ZADD = 1, ZCARD = 1, ZCOUNT = 1, ZRANGE = 1, ZRANGEBYSCORE = 1, ZRANK = 1,
    ZREM = 1, ZREMRANGEBYSCORE = 1, ZSCAN = 1, ZSCORE = 1,
  }
  for _, key in ipairs(server.call('ZRANGEBYSCORE', expiries, '-inf', '(' .. string.format('%.0f', now))) do
    server.call('DEL', key)
    server.call('ZREM', expiries, key)
  end
  local function expire(key, lasts)
    local text = type(lasts) == 'number' and string.format('%.17g', lasts) or lasts
    assert(string.match(text, '^-?%d+$'), text .. ' is no integer')
    if server.call('EXISTS', key) == 0 then return 0 end
    server.call('ZADD', expiries, now + text, key)
    return 1
  end
  local function note(key)
    if server.call('EXISTS', key) == 0 then server.call('ZREM', expiries, key)
    else server.call('ZADD', expiries, 'NX', 'inf', key) end
  end
  local verbs = {}
  function verbs.TIME() return {string.format('%d', time / 1000000), string.format('%d', time % 1000000)} end
  function verbs.PEXPIRE(key, lasts)
    local reply = expire(key, lasts)
    if lasts + 0 <= 0 then
      server.call('DEL', key)
      note(key)
    end
    return reply
  end
  function verbs.PTTL(key)
    if server.call('EXISTS', key) == 0 then return -2 end
    local at = server.call('ZSCORE', expiries, key)
    return at == 'inf' and -1 or at - now
  end
  function verbs.SET(key, value, option, lasts)
    assert(not option or (option == 'PX' and lasts + 0 > 0))
    local reply = server.call('SET', key, value)
    server.call('ZADD', expiries, 'inf', key)
    if option then expire(key, lasts) end
    return reply
  end
  function verbs.LOSE()
    for _, key in ipairs(server.call('ZRANGE', expiries, 0, -1)) do server.call('DEL', key) end
    return server.call('DEL', expiries)
  end
  return {call = function(verb, key, ...)
    if verbs[verb] then return verbs[verb](key, ...) end
    assert(known[verb], verb .. ' is not known to the clock of the tests')
    local reply = server.call(verb, key, ...)
    for _, one in ipairs(verb == 'DEL' and {key, ...} or {key}) do note(one) end
    return reply
  end}
end)(redis, 'EXPIRIES', table.remove(ARGV))
"""
#: A script that sends one command.
_COMMAND = "return redis.call(unpack(ARGV))"


class ClockedRedisStore(RedisStore):
    """The store on a server, with a clock that only the test advances.

    Arguments:
        url: of the server.
        time: of the clock, in seconds since 1970.
        history: how many runs are kept; None: nothing is recorded.
        alter: changes the text of a script, to break the store on purpose.
    """

    def __init__(
        self, url: str, time: float, history: int | None = None, alter: Callable[[str], str] = lambda text: text
    ) -> None:
        super().__init__(connector(url, {}), 5.0, None, history)
        self._alter = alter
        self._digests: dict[str, str] = {}
        self._clock = _CLOCK.replace("EXPIRIES", f"expiries:{secrets.token_hex(8)}")
        self.set_time(time)

    def set_time(self, time: float) -> None:
        """Set the clock."""
        self._time = str(round(time * 1e6))

    def run(self, call: ScriptCall, timeout: float | None = None, once: bool = False) -> Any:
        return self._evaluate(call.script, *call.texts[2:])

    def command(self, *words: str, timeout: float | None = None) -> Any:
        return self._evaluate(_COMMAND, "0", *words)

    def lose(self) -> None:
        """Delete all data but the time."""
        self.command("LOSE")

    def close(self) -> None:
        self.lose()
        super().close()

    def _evaluate(self, script: str, *words: str) -> Any:
        digest = self._digests.get(script)
        if digest is None:
            digest = super().command("SCRIPT", "LOAD", self._clock + self._alter(script))
            self._digests[script] = digest
        return super().command("EVALSHA", digest, *words, self._time)
