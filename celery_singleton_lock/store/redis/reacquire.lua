-- Acquires a lock again that is missing while its body goes on, unless another token owns it.
-- KEYS  1 lock   2 attempt   3 fence   4 recent   5 revoked (see acquire.lua)
-- ARGV  1 token   2 TTL (ms)   3 task id   4 node   5 pid   6 '1' if supervised   7 fence of the lease
-- Returns {result, 1 if this call acquired it}; result: 'renewed' | 'lost' (another held it in between) | 'not_owner' | 'revoked'
--@feature records  KEYS registry, stats
--@feature limit  KEYS slots | ARGV slot_limit
if redis.call('ZSCORE', KEYS[5], ARGV[1]) then return {'revoked', 0} end
local owner = redis.call('HGET', KEYS[1], 'token')
if owner and owner ~= ARGV[1] then return {'not_owner', 0} end
local lost = (redis.call('ZSCORE', KEYS[4], KEYS[1]) or 0) + 0 > ARGV[7] + 0
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if not owner then
  local since, fence = string.format('%.0f', now), ARGV[7]
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'task', ARGV[3], 'node', ARGV[4], 'pid', ARGV[5],
             'since', since, 'fence', fence, 'ttl', ARGV[2])
  --@if records
  -- Notes the lease as a new one.
  --@include entry
  if redis.call('ZADD', registry, now + ARGV[2], entry_of(KEYS[1], registry, ARGV[3], ARGV[4], ARGV[5], since, fence)) == 0 then
    redis.call('HINCRBY', stats, 'expired', '1') -- the lease before it began in the same millisecond, and had the same entry
  end
  redis.call('HINCRBY', stats, 'reacquired', '1')
  --@end
  if not lost then
    redis.call('ZADD', KEYS[4], ARGV[7], KEYS[1])
    redis.call('PEXPIRE', KEYS[4], ARGV[2])
  end
  if (redis.call('GET', KEYS[3]) or 0) + 0 < ARGV[7] + 0 then redis.call('SET', KEYS[3], ARGV[7]) end
else
  redis.call('HSET', KEYS[1], 'renewed', now)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
--@if limit
-- Notes a slot as held again, so that requests with a lower limit count it, and how many may be.
redis.call('HSET', KEYS[1], 'limit', slot_limit)
local number = string.match(KEYS[1], ':lock:[^:]+:(%d+)$')
if number then
  redis.call('SADD', slots, number)
  redis.call('PEXPIRE', slots, math.max(ARGV[2], redis.call('PTTL', slots)))
end
--@end
if ARGV[6] == '1' then redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[2]) end
return {lost and 'lost' or 'renewed', owner and 0 or 1}
