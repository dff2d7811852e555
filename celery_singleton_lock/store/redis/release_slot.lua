-- KEYS slots
-- The slot is remembered as long as the lock is kept (see acquire_limit.lua).
redis.call('PEXPIRE', slots, math.max(kept_ttl, redis.call('PTTL', slots)))
