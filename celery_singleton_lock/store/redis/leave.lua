-- Takes a message out of the line. Its copies are dropped from now on. If it was woken, the next one may be (see wake.lua).
-- KEYS  1 line   2 waiting   3 used (see acquire_line.lua)   4 lock
-- ARGV  1 ticket   2 for how long (ms) copies are dropped
if redis.call('HGET', KEYS[4], 'token') == 'queued:line' and redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1] then
  redis.call('HDEL', KEYS[4], 'woken')
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1] .. ':due', ARGV[1] .. ':copy', ARGV[1] .. ':task', ARGV[1] .. ':message')
local time = redis.call('TIME')
redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return 0
