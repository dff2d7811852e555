-- KEYS registry, stats
-- Notes the lease as a new one (see acquire_recorded.lua).
--@entry
if redis.call('ZADD', registry, now + ARGV[2], entry_of(KEYS[1], registry, ARGV[3], ARGV[4], ARGV[5], since, fence)) == 0 then
  redis.call('HINCRBY', stats, 'expired', '1') -- the lease before it began in the same millisecond, and had the same entry
end
redis.call('HINCRBY', stats, 'reacquired', '1')
