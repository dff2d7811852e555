-- The message leaves the line, and its other copies are dropped from now on.
if ticket ~= '' then
  leave(ticket)
  use(ticket, copy)
end
--@calm
local first = redis.call('ZRANGE', line, 0, 0)[1]
if first and redis.call('HGET', waiting, first .. ':task') == ARGV[3] then -- another delivery of this message: nobody is to be skipped for it
  leave(first)
  first = redis.call('ZRANGE', line, 0, 0)[1]
end
if first then redis.call('HSET', KEYS[1], 'line', 1) else redis.call('HDEL', KEYS[1], 'line') end
