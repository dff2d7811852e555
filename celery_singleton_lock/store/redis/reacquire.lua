-- Acquires a lock again that is missing while its body goes on, unless another token owns it.
-- KEYS  1 lock   2 attempt   3 fence   4 recent   5 revoked (see acquire.lua)
-- ARGV  1 token   2 TTL (ms)   3 task id   4 node   5 pid   6 '1' if supervised   7 fence of the lease
-- Returns {result, 1 if this call acquired it}; result: 'renewed' | 'lost' (another held it in between) | 'not_owner' | 'revoked'
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
  --@recorded
  if not lost then
    redis.call('ZADD', KEYS[4], ARGV[7], KEYS[1])
    redis.call('PEXPIRE', KEYS[4], ARGV[2])
  end
  if (redis.call('GET', KEYS[3]) or 0) + 0 < ARGV[7] + 0 then redis.call('SET', KEYS[3], ARGV[7]) end
else
  redis.call('HSET', KEYS[1], 'renewed', now)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
--@slot
if ARGV[6] == '1' then redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[2]) end
return {lost and 'lost' or 'renewed', owner and 0 or 1}
