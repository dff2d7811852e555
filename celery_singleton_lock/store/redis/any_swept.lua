-- Counts up to two leases that have expired. A second late, as a renewal may come in the millisecond in which a lease expires.
for _, one in ipairs(redis.call('ZRANGEBYSCORE', registry, '-inf', now - 1000, 'LIMIT', 0, 2)) do
  redis.call('ZREM', registry, one)
  if string.sub(one, 1, 5) ~= 'held\31' then redis.call('HINCRBY', stats, 'expired', 1) end
  if string.sub(one, 1, 8) == 'running\31' and history_length ~= '0' then
    redis.call('LPUSH', history, string.format('%.0f\31expired\31\31%s', now, one))
    redis.call('LTRIM', history, 0, history_length - 1)
  end
end
