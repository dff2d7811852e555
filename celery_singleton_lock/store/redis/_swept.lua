-- Counts leases that have expired. A second late, as a renewal may come in the millisecond in which a lease expires.
local expired = redis.call('ZRANGEBYSCORE', registry, '-inf', now - 1000, 'WITHSCORES', 'LIMIT', 0, 16)
for i = 1, #expired, 2 do
  local entry, ended = expired[i], expired[i + 1]
  redis.call('ZREM', registry, entry)
  if string.sub(entry, 1, 9) ~= 'cooldown\31' then redis.call('HINCRBY', stats, 'expired', '1') end
  if string.sub(entry, 1, 8) == 'running\31' then
    local outcome, problem, fate = 'expired', '', 'expired'
    --@include logged
  end
end
