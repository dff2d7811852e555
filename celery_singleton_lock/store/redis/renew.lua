--!df flags=allow-undeclared-keys
-- Extends the leases that these tokens own.
-- KEYS  for each lease: lock, or the attempt key again where only the token is known; attempt; revoked (see acquire.lua); registry
-- ARGV  for each lease: token; TTL (ms)
-- Not in KEYS: the lock, where only its token is known, and its set of slots.
-- Returns for each lease 'renewed' (where only the token is known, the lock instead) | 'stop' (renewed, and asked to stop) | 'missing' (nobody holds the lock) | 'not_owner' | 'revoked'
--@feature limit
--@feature stop  ARGV stoppable
--@include entry
local results = {}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #KEYS / 4 do
  local lock, attempt, revoked = KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1]
  local token, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local by_token = lock == attempt
  if by_token then lock = redis.call('GET', attempt) end
  local holder = lock and redis.call('HMGET', lock, 'token', 'task', 'node', 'pid', 'since', 'fence') or {}
  local owner = holder[1]
  if owner == token then
    redis.call('PEXPIRE', lock, ttl)
    if not by_token then redis.call('HSET', lock, 'renewed', now) end -- not a supervisor's: it tells nothing of the body
    if holder[2] then redis.call('ZADD', KEYS[4 * i], 'XX', now + ttl, entry_of(lock, KEYS[4 * i], unpack(holder, 2, 6))) end
    redis.call('PEXPIRE', attempt, ttl)
    --@if limit
    -- Notes a slot as held again, so that requests with a lower limit count it.
    local base, digest, number = string.match(lock, '^(.*):lock:([^:]+):(%d+)$')
    if number then
      local slots = base .. ':slots:' .. digest
      redis.call('SADD', slots, number)
      redis.call('PEXPIRE', slots, math.max(ttl, redis.call('PTTL', slots)))
    end
    --@end
    results[i] = by_token and lock or 'renewed'
    --@if stop
    -- Answers 'stop' for a lease whose holder is asked to stop. `stoppable` has '1' for each lease that looks, else '0'.
    if string.sub(stoppable, i, i) == '1' and redis.call('HGET', lock, 'stop') == token then results[i] = 'stop' end
    --@end
  elseif redis.call('ZSCORE', revoked, token) then
    results[i] = 'revoked'
  else
    results[i] = owner and 'not_owner' or 'missing'
  end
end
return results
