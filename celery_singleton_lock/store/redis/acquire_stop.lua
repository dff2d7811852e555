-- Asks a holder that runs to stop, or takes the place of a message with a reservation (see acquire_replaced.lua). A cooldown and a pause stay.
if room ~= '' and owner and owner ~= '' and owner ~= ARGV[1] and owner ~= 'queued:line' and holder[2] ~= ARGV[3] then
  local lasts = math.max(window, redis.call('PTTL', KEYS[1]))
  redis.call('ZREMRANGEBYSCORE', replaced, '-inf', now)
  redis.call('ZADD', replaced, now + lasts, (holder[7] or 'running') .. ':' .. holder[2])
  redis.call('PEXPIRE', replaced, math.max(lasts, redis.call('PTTL', replaced)))
  if holder[7] then
    redis.call('DEL', KEYS[1])
    --@freed
    owner = nil
  elseif not asked then
    redis.call('HSET', KEYS[1], 'stop', owner, 'asked', now)
  end
end
