-- ARGV fence, where
-- Notes the end of a body that does not own its lock any more. In the history, it takes the place of what became of its lease.
--   fence: of the lease, '' if there was no body   where: pid, node, digest and slot, and task id, for a lease that nothing tells of
if fence ~= '' and outcome ~= 'started' then
  local time = redis.call('TIME')
  local now, mark, entry = time[1] * 1000 + math.floor(time[2] / 1000), '\31' .. fence .. '\31'
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', registry, '-inf', now, 'LIMIT', 0, 100)) do
    if string.find(one, mark, 1, true) then entry = one end
  end
  if entry then
    redis.call('ZREM', registry, entry)
    redis.call('HINCRBY', stats, 'expired', '1')
  end
  local is_new, fate = true, loss ~= '' and loss or 'expired'
  for _, run in ipairs(redis.call('LRANGE', history, 0, -1)) do
    if string.find(run, mark, 1, true) then
      local how, former, rest = string.match(run, '^[^\31]*\31([^\31]*)\31[^\31]*\31([^\31]*)\31(.*)$')
      if how == 'expired' or how == 'released_by_operator' then
        redis.call('LREM', history, 1, run)
        entry, fate = rest, former == 'released_by_operator' and former or fate
      else
        is_new = false -- this call was sent before
      end
    end
  end
  if is_new then
    entry = entry or ('running' .. mark .. string.format('%.0f', math.floor(fence / 1000)) .. '\31' .. where)
    local ended = string.format('%.0f', now)
    if outcome == 'success' then redis.call('HSET', stats, 'last_success', ended) end
    --@logged
  end
end
