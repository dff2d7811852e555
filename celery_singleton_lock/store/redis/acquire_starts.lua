-- KEYS starts | ARGV start_limit, start_window
  -- starts: sorted set of token -> time (ms) of a start that counts   start_limit: of them   start_window: how long (ms) each counts
  redis.call('ZREMRANGEBYSCORE', starts, '-inf', string.format('%.0f', now - start_window))
  local too_many = redis.call('ZCARD', starts) >= start_limit + 0 and not redis.call('ZSCORE', starts, ARGV[1])
  --@running
  if too_many then
    redis.call('DEL', KEYS[1]) -- a reservation of this message
    --@freed
    --@barred
    return {'too_many_starts'}
  end
  redis.call('ZADD', starts, string.format('%.0f', now), ARGV[1])
  redis.call('PEXPIRE', starts, start_window)
