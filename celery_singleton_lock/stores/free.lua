-- Takes a lock from whoever has it. The token is remembered for an hour at least, so that its owner, which may be stopped, finds
-- the lock lost instead of taking it again.
-- KEYS  1 lock
-- ARGV  1 what an attempt key starts with (in the same hash slot)
-- Returns {task id, node, pid, age (ms), remaining (ms)} of who had it, or nothing
local has = redis.call('HMGET', KEYS[1], 'task', 'node', 'pid', 'since', 'token')
if not has[1] then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
local believed = math.max(left, 1000) * 2
redis.call('SET', ARGV[1] .. has[5], '', 'PX', math.max(believed, 3600000))
redis.call('SET', (string.gsub(KEYS[1], '^(.*):lock:', '%1:ran:')), '', 'PX', believed)
return {has[1], has[2], has[3], now - has[4], left}
