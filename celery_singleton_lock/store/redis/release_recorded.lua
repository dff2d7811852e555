-- KEYS registry, stats, history | ARGV outcome, problem, history_length
-- Notes the end of a lease (see acquire_recorded.lua). `problem`: the beginning of the body's error.
--@entry
--@observe
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entry = entry_of(lock, registry, unpack(holder, 4, 9))
if redis.call('ZREM', registry, entry) == 1 then
  redis.call('HINCRBY', stats, 'released:' .. outcome, 1)
  if not holder[9] and outcome ~= 'started' then -- a body has run
    observe('hold', now - holder[7])
    if outcome == 'success' then redis.call('HSET', stats, 'last_success', string.format('%.0f', now)) end
    local ended = now
    --@logged
  end
end
