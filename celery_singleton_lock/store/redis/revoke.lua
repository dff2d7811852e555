--!df flags=allow-undeclared-keys
-- Takes a lock from its holder. The fence is raised, so that a resource that has seen it refuses the former holder. The token counts
-- as revoked for a time, so that a holder that was stopped finds its lock lost and does not acquire it again.
-- KEYS  1 lock   2 fence   3 recent   4 revoked (see acquire.lua)
-- ARGV  1 how long (ms) at least the token counts as revoked   2 the fence of the lease from which alone it is taken, '' from anyone
-- Returns {task id, node, pid, age (ms), remaining (ms), fence, state} of that holder, or nothing
--@feature limit  KEYS slots
--@feature starts  KEYS starts
--@feature records  KEYS registry, stats, history | ARGV history_length
--@if limit
--@include oldest
--@end
--@if starts
redis.call('DEL', starts)
--@end
local holder = redis.call('HMGET', KEYS[1], 'task', 'node', 'pid', 'since', 'fence', 'state', 'token')
if not holder[1] or (ARGV[2] ~= '' and ARGV[2] ~= holder[5]) then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = redis.call('PTTL', KEYS[1])
local ttl = math.max(2 * left, ARGV[1] + 0)
local fence = string.format('%.0f', math.max((redis.call('GET', KEYS[2]) or 0) + 1, time[1] * 1000000 + time[2]))
redis.call('DEL', KEYS[1])
--@if records
-- Notes the end of a lease.
--@include entry
local entry = entry_of(KEYS[1], registry, unpack(holder, 1, 6))
if redis.call('ZREM', registry, entry) == 1 and holder[6] ~= 'cooldown' then
  redis.call('HINCRBY', stats, 'released_by_operator', '1')
  if not holder[6] then
    local ended, outcome, problem, fate = string.format('%.0f', now), 'released_by_operator', '', 'released_by_operator'
    --@include logged
  end
end
--@end
redis.call('SET', KEYS[2], fence)
redis.call('ZADD', KEYS[3], fence, KEYS[1])
redis.call('PEXPIRE', KEYS[3], math.max(ttl, redis.call('PTTL', KEYS[3])))
if not holder[6] then -- else no body runs
  redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', string.format('%.0f', now))
  redis.call('ZADD', KEYS[4], string.format('%.0f', now + ttl), holder[7])
  redis.call('PEXPIRE', KEYS[4], math.max(ttl, redis.call('PTTL', KEYS[4])))
end
return {holder[1], holder[2], holder[3], now - holder[4], left, holder[5], holder[6]}
