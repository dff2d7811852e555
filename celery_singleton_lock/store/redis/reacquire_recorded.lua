-- KEYS registry, stats
-- Notes the lease as a new one (see acquire_recorded.lua).
--@entry
redis.call('ZADD', registry, now + ARGV[2], entry_of(KEYS[1], registry, ARGV[3], ARGV[4], ARGV[5], since, fence))
redis.call('HINCRBY', stats, 'reacquired', '1')
