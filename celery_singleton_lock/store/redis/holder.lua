-- Tells who has a lock.
-- KEYS  1 lock
-- Returns {task id, node, pid, age (ms), remaining (ms), fence}, or nothing
local has = redis.call('HMGET', KEYS[1], 'task', 'node', 'pid', 'since', 'fence')
if not has[1] then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
return {has[1], has[2], has[3], now - has[4], redis.call('PTTL', KEYS[1]), has[5]}
