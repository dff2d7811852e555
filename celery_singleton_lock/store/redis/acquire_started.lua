-- The message leaves the line, and its other copies are dropped from now on.
if ticket ~= '' then
  leave(ticket)
  use(ticket, copy)
end
--@calm
if redis.call('ZCARD', line) > 0 then redis.call('HSET', KEYS[1], 'line', 1) else redis.call('HDEL', KEYS[1], 'line') end
