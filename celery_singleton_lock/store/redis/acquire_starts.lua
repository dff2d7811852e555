-- KEYS starts | ARGV limit, window
  -- starts: sorted set of token -> time (ms) of a start that counts   limit: of them   window: how long (ms) each counts
  redis.call('ZREMRANGEBYSCORE', starts, '-inf', string.format('%.0f', now - window))
  if redis.call('ZCARD', starts) >= limit + 0 and not redis.call('ZSCORE', starts, ARGV[1]) then return {'too_many_starts'} end
  redis.call('ZADD', starts, string.format('%.0f', now), ARGV[1])
  redis.call('PEXPIRE', starts, window)
