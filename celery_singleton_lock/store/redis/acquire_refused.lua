-- Counts a duplicate, also for its holder, or a redelivery of the message that holds the lock.
if owner and holder[2] == ARGV[3] then
  redis.call('HINCRBY', stats, 'redelivery_checks', 1)
elseif policy ~= '' then
  redis.call('HINCRBY', stats, 'duplicates:' .. policy, 1)
  if owner and hold_left == 0 then redis.call('HINCRBY', KEYS[1], 'duplicates', 1) end
end
