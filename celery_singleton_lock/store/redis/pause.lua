-- Has no body start, with a lock key or of the whole task name; running bodies go on.
-- KEYS  1 pauses (see acquire.lua)
-- ARGV  1 digest of the lock key, or '*'   2 for how long (ms)   3 '<by whom>\31<why>'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now + ARGV[2]),
           ARGV[1] .. ':about', string.format('%.0f', now) .. '\31' .. ARGV[3])
redis.call('PEXPIRE', KEYS[1], math.max(ARGV[2], redis.call('PTTL', KEYS[1])))
return 0
