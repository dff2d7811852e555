-- KEYS begun | ARGV begun_ttl
-- Notes that the body begins, until its end is seen: its message is delivered again if its process dies.
--   begun: sorted set of task id -> until when (ms) that counts   begun_ttl: for how long (ms)
redis.call('ZREMRANGEBYSCORE', begun, '-inf', string.format('%.0f', now))
redis.call('ZADD', begun, string.format('%.0f', now + begun_ttl), ARGV[3])
redis.call('PEXPIRE', begun, begun_ttl)
