-- Names the message of the first in line whose turn has come and who was not named, where `limit` may hold the lock of the slot `lock`.
-- No slot is reserved for it. Nobody is named during a quiet time.
do
  local base, digest = string.match(lock, '^(.*):lock:([^:]+)')
  local first, line, waiting = base .. ':lock:' .. digest, base .. ':line:' .. digest, base .. ':waiting:' .. digest
  local free = limit - redis.call('EXISTS', first)
  for _, number in ipairs(redis.call('SMEMBERS', base .. ':slots:' .. digest)) do
    free = free - redis.call('EXISTS', first .. ':' .. number)
  end
  local time = redis.call('TIME')
  local now, rank = time[1] * 1000 + math.floor(time[2] / 1000), 0
  if (redis.call('HGET', waiting, 'quiet_until') or 0) + 0 > now then free = 0 end
  while message == '' and rank < free do
    local one = redis.call('ZRANGE', line, rank, rank)[1]
    if not one then break end
    local fields = redis.call('HMGET', waiting, one .. ':due', one .. ':message')
    if (fields[2] or '') ~= '' then
      message = fields[2]
      redis.call('HSET', waiting, one .. ':due', now + lasts, one .. ':message', '')
    elseif (fields[1] or 0) + 0 < now then
      redis.call('ZREM', line, one)
      redis.call('HDEL', waiting, one .. ':due', one .. ':copy', one .. ':task', one .. ':message')
      if redis.call('HGET', waiting, 'newest') == one then redis.call('HDEL', waiting, 'newest') end
    else
      rank = rank + 1
    end
  end
end
