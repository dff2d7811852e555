-- Notes the slot that acquire_limit.lua has chosen as held, and how many may be, and answers {'granted', fence, slot}.
redis.call('HSET', KEYS[1], 'limit', slot_limit)
if slot > 0 then
  redis.call('SADD', slots, slot)
  redis.call('PEXPIRE', slots, math.max(ARGV[2], redis.call('PTTL', slots)))
end
do return {'granted', fence, slot} end
