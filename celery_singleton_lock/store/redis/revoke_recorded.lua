-- KEYS registry, stats, history | ARGV history_length
-- Notes the end of a lease (see acquire_recorded.lua).
--@entry
local entry = entry_of(KEYS[1], registry, unpack(holder, 1, 6))
if redis.call('ZREM', registry, entry) == 1 and holder[6] ~= 'cooldown' then
  redis.call('HINCRBY', stats, 'released_by_operator', '1')
  if not holder[6] then
    local ended, outcome, problem, fate = string.format('%.0f', now), 'released_by_operator', '', 'released_by_operator'
    --@logged
  end
end
