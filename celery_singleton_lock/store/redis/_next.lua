-- Names the message of the head of the line, and reserves the lock for it for a time (`lasts`, in ms). The lock is deleted if nobody waits,
-- or if only a delayed copy starts the head: as its message is too long, was named before, or after a quiet time.
do
  local base, digest = string.match(lock, '^(.*):lock:([^:]+)')
  local line, waiting = base .. ':line:' .. digest, base .. ':waiting:' .. digest
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local head, fields = redis.call('ZRANGE', line, 0, 0)[1], {}
  while head do
    fields = redis.call('HMGET', waiting, head .. ':due', head .. ':message', head .. ':task', 'quiet_until')
    if (fields[2] or '') ~= '' or (fields[1] or 0) + 0 >= now then break end
    redis.call('ZREM', line, head)
    redis.call('HDEL', waiting, head .. ':due', head .. ':copy', head .. ':task', head .. ':message')
    if redis.call('HGET', waiting, 'newest') == head then redis.call('HDEL', waiting, 'newest') end
    head = redis.call('ZRANGE', line, 0, 0)[1]
  end
  if head and fields[2] ~= '' and (fields[4] or 0) + 0 <= now then
    message = fields[2]
    redis.call('HSET', waiting, head .. ':due', now + lasts, head .. ':message', '') -- a second publication would run again
    redis.call('HSET', lock, 'token', 'queued:line', 'state', 'queued', 'task', fields[3], 'named', 1, 'duplicates', 0,
               'identity', string.match(head, '^[^.]*'))
    redis.call('PEXPIRE', lock, lasts)
  else
    redis.call('DEL', lock)
  end
end
