-- The lock is listed as what it becomes. A reservation is a lease, a hold is none.
if holder[4] then
  local entry = string.gsub(holder[4], '^%a+', kept_state)
  redis.call('HSET', lock, 'entry', entry)
  redis.call('ZADD', registry, now + kept_ttl, entry)
  if kept_state == 'queued' then redis.call('HINCRBY', stats, 'acquired', 1) end
end
