--!df flags=allow-undeclared-keys
-- Extends the leases that these tokens own.
-- KEYS  for each lease: lock, or the attempt key again where only the token is known; attempt; revoked (see acquire.lua); registry
-- ARGV  for each lease: token; TTL (ms)
-- Returns for each lease 'renewed' (where only the token is known, the lock instead) | 'stop' (renewed, and asked to stop) | 'missing' (nobody holds the lock) | 'not_owner' | 'revoked'
--@entry
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
    --@limit
    results[i] = by_token and lock or 'renewed'
    --@stop
  elseif redis.call('ZSCORE', revoked, token) then
    results[i] = 'revoked'
  else
    results[i] = owner and 'not_owner' or 'missing'
  end
end
return results
