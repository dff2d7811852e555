-- ARGV kept_token, kept_state, kept_ttl
-- The lock becomes another owner's, or nobody's, for a time (ms).
redis.call('HSET', lock, 'token', kept_token, 'state', kept_state)
redis.call('HDEL', lock, 'redelivered')
redis.call('PEXPIRE', lock, kept_ttl)
--@listed
--@slot
lock, holder[3] = KEYS[2], false -- the attempt key is deleted instead
