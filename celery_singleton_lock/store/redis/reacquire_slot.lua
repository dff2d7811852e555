-- KEYS slots | ARGV slot_limit
-- Notes a slot as held again, so that requests with a lower limit count it (see acquire_limit.lua), and how many may be.
redis.call('HSET', KEYS[1], 'limit', slot_limit)
local number = string.match(KEYS[1], ':lock:[^:]+:(%d+)$')
if number then
  redis.call('SADD', slots, number)
  redis.call('PEXPIRE', slots, math.max(ARGV[2], redis.call('PTTL', slots)))
end
