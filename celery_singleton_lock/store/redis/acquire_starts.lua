-- KEYS starts | ARGV start_limit, start_window
  -- starts: sorted set of token -> time (ms) of a start that counts   start_limit: of them   start_window: how long (ms) each counts
  redis.call('ZREMRANGEBYSCORE', starts, '-inf', string.format('%.0f', now - start_window))
  local too_many = redis.call('ZCARD', starts) >= start_limit + 0 and not redis.call('ZSCORE', starts, ARGV[1])
  --@running
  if too_many then
    if redis.call('HGET', KEYS[1], 'token') == 'queued:line' then
      redis.call('HSET', KEYS[1], 'state', 'queued') -- for the next in line, when this message leaves it
    else
      redis.call('DEL', KEYS[1]) -- a reservation of this message
      --@freed
    end
    --@barred
    return {'too_many_starts'}
  end
  redis.call('ZADD', starts, string.format('%.0f', now), ARGV[1])
  redis.call('PEXPIRE', starts, start_window)
