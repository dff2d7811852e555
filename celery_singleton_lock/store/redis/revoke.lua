--!df flags=allow-undeclared-keys
-- Takes a lock from whoever has it. The token is remembered for an hour at least, so that its owner, which may be stopped, finds
-- the lock lost instead of taking it again. The fence is raised, so that a resource that has seen it refuses the former owner.
-- KEYS  1 lock   2 fence   3 recent (see acquire.lua)
-- ARGV  1 what an attempt key starts with (in the same hash slot)
-- Returns {task id, node, pid, age (ms), remaining (ms), fence} of who had it, or nothing
local has = redis.call('HMGET', KEYS[1], 'task', 'node', 'pid', 'since', 'token', 'fence')
if not has[1] then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = redis.call('PTTL', KEYS[1])
local believed = math.max(left, 1000) * 2
local fence = string.format('%.0f', math.max((redis.call('GET', KEYS[2]) or 0) + 1, time[1] * 1000000 + time[2]))
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], fence)
redis.call('ZADD', KEYS[3], fence, KEYS[1])
redis.call('PEXPIRE', KEYS[3], math.max(believed, redis.call('PTTL', KEYS[3])))
redis.call('SET', ARGV[1] .. has[5], '', 'PX', math.max(believed, 3600000))
return {has[1], has[2], has[3], now - has[4], left, has[6]}
