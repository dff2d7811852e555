--!df flags=allow-undeclared-keys
-- Names the message of the first in line whose turn has come and who was not woken, where several may hold the signature.
-- KEYS  1 lock of slot 0   2 line   3 waiting (see acquire_line.lua)   4 slots (see acquire_limit.lua)
-- ARGV  1 how long (ms) its place is kept   2 how many may hold the signature
-- Returns the message, or '' if there is none, as in a quiet time. It is named once: if it does not start, its delayed copy comes.
local free = ARGV[2] - redis.call('EXISTS', KEYS[1])
for _, number in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  free = free - redis.call('EXISTS', KEYS[1] .. ':' .. number)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if (redis.call('HGET', KEYS[3], 'quiet_until') or 0) + 0 > now then return '' end
local rank = 0
while rank < free do
  local one = redis.call('ZRANGE', KEYS[2], rank, rank)[1]
  if not one then break end
  local fields = redis.call('HMGET', KEYS[3], one .. ':due', one .. ':message')
  if (fields[1] or 0) + 0 < now then
    redis.call('ZREM', KEYS[2], one)
    redis.call('HDEL', KEYS[3], one .. ':due', one .. ':copy', one .. ':task', one .. ':message')
  elseif fields[2] ~= '' then
    redis.call('HSET', KEYS[3], one .. ':due', now + ARGV[1], one .. ':message', '')
    return fields[2]
  else
    rank = rank + 1
  end
end
return ''
