-- Notes a slot as held again, so that requests with a lower limit count it (see acquire_limit.lua).
local base, digest, number = string.match(lock, '^(.*):lock:([^:]+):(%d+)$')
if number then
  local slots = base .. ':slots:' .. digest
  redis.call('SADD', slots, number)
  redis.call('PEXPIRE', slots, math.max(ttl, redis.call('PTTL', slots)))
end
