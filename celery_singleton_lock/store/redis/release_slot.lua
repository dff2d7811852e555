-- KEYS slots
-- The slot is remembered as long as the lock is kept (see acquire_limit.lua).
if string.match(lock, ':lock:[^:]+:%d+$') then
  redis.call('SADD', slots, string.match(lock, '%d+$'))
  redis.call('PEXPIRE', slots, math.max(kept_ttl, redis.call('PTTL', slots)))
end
