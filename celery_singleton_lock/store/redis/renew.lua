--!df flags=allow-undeclared-keys
-- Extends the leases that these tokens own.
-- KEYS  for each lease: lock, or the attempt key again where only the token is known; attempt; revoked (see acquire.lua)
-- ARGV  for each lease: token; TTL (ms)
-- Returns for each lease 'renewed' | 'stop' (renewed, and asked to stop) | 'missing' (nobody holds the lock) | 'not_owner' | 'revoked'
local results = {}
for i = 1, #KEYS / 3 do
  local lock, attempt, revoked = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
  local token, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  if lock == attempt then lock = redis.call('GET', attempt) end
  local owner = lock and redis.call('HGET', lock, 'token')
  if owner == token then
    redis.call('PEXPIRE', lock, ttl)
    redis.call('PEXPIRE', attempt, ttl)
    --@limit
    results[i] = 'renewed'
    --@stop
  elseif redis.call('ZSCORE', revoked, token) then
    results[i] = 'revoked'
  else
    results[i] = owner and 'not_owner' or 'missing'
  end
end
return results
