-- Writes a key, as an acquire writes a lock, to see whether this server takes it.
-- KEYS  1 check: a hash that expires
-- ARGV  1 TTL (ms)
redis.call('HSET', KEYS[1], 'checked', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
