-- Names the message of the head of the line, for which a release has reserved the lock.
-- KEYS  1 lock   2 line   3 waiting (see acquire_line.lua)
-- ARGV  1 how long (ms) it stays reserved
-- Returns the message, or '' if it was named before, if the line is empty, or its head is started by its delayed copy: now, or after a quiet time
local lock = redis.call('HMGET', KEYS[1], 'token', 'woken')
if lock[1] ~= 'queued:line' or lock[2] then return '' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local head = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
while head do
  local fields = redis.call('HMGET', KEYS[3], head .. ':due', head .. ':message', head .. ':task', 'quiet_until')
  if (fields[1] or 0) + 0 >= now then
    if fields[2] == '' or (fields[4] or 0) + 0 > now then break end
    redis.call('HSET', KEYS[3], head .. ':due', now + ARGV[1])
    redis.call('HSET', KEYS[1], 'task', fields[3], 'woken', 1)
    redis.call('PEXPIRE', KEYS[1], ARGV[1])
    return fields[2]
  end
  redis.call('ZREM', KEYS[2], head)
  redis.call('HDEL', KEYS[3], head .. ':due', head .. ':copy', head .. ':task', head .. ':message')
  head = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
end
redis.call('DEL', KEYS[1])
return ''
