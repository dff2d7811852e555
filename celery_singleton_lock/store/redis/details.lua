-- Tells of locks how many duplicates their holders have met, and how many messages wait in line.
-- KEYS  for each lock: lock (see acquire.lua); line (see acquire_line.lua)
-- Returns both numbers for each lock
local found = {}
for i = 1, #KEYS / 2 do
  found[2 * i - 1] = (redis.call('HGET', KEYS[2 * i - 1], 'duplicates') or 0) + 0
  found[2 * i] = redis.call('ZCARD', KEYS[2 * i])
end
return found
