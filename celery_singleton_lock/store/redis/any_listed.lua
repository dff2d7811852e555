-- Lists the lease, which expires after the TTL.
local digest = string.match(KEYS[1], '.*:lock:(.*)')
local entry = string.format('%s\31%s\31%.0f\31%s\31%s\31%s\31%s', state, fence, now, ARGV[5], ARGV[4], digest, ARGV[3])
redis.call('HSET', KEYS[1], 'entry', entry)
redis.call('ZADD', registry, now + ARGV[2], entry)
