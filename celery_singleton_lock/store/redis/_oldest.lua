-- Lets the verb go on with the slot whose lease is the oldest (see acquire.lua).
do
  local first, least = KEYS[1], redis.call('HGET', KEYS[1], 'fence')
  for _, number in ipairs(redis.call('SMEMBERS', slots)) do
    local fence = redis.call('HGET', first .. ':' .. number, 'fence')
    if fence and (not least or fence + 0 < least + 0) then KEYS[1], least = first .. ':' .. number, fence end
  end
end
