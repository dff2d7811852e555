--!df flags=allow-undeclared-keys
-- Names the holder of a lock.
-- KEYS  1 lock (see acquire.lua)
-- Returns {task id, node, pid, age (ms), remaining (ms), fence, state, TTL (ms), for how long (ms) its process has not renewed it}, or nothing
--@feature limit  KEYS slots
--@if limit
--@include oldest
--@end
local holder = redis.call('HMGET', KEYS[1], 'task', 'node', 'pid', 'since', 'fence', 'state', 'ttl', 'renewed')
if not holder[1] then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local renewed = math.max(holder[4] + 0, (holder[8] or 0) + 0) -- not by a former holder
return {holder[1], holder[2], holder[3], now - holder[4], redis.call('PTTL', KEYS[1]), holder[5], holder[6], holder[7], now - renewed}
