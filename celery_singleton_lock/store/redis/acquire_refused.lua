-- Counts a duplicate, also for its holder, or a redelivery of the message that holds the lock. A call that is published during an
-- operator's pause is counted when it starts; a copy in line is no redelivery. A free lock, and nobody in line (`first`): it waits for quiet.
if owner and holder[2] == ARGV[3] then
  if ARGV[1] ~= 'queued:line' then redis.call('HINCRBY', stats, 'redelivery_checks', '1') end
elseif policy ~= '' and (owner or first) and (pause_left == 0 or string.sub(ARGV[1], 1, 7) ~= 'queued:') then
  redis.call('HINCRBY', stats, 'duplicates:' .. policy, '1')
  if owner and pause_left == 0 then redis.call('HINCRBY', KEYS[1], 'duplicates', '1') end
end
