-- KEYS slots, first
-- Finds the slot of a reservation (see acquire_limit.lua), which has no attempt key.
lock = redis.call('HGET', first, 'token') == ARGV[1] and first
for _, number in ipairs(redis.call('SMEMBERS', slots)) do
  if redis.call('HGET', first .. ':' .. number, 'token') == ARGV[1] then lock = first .. ':' .. number end
end
