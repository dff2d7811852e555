-- KEYS registry, stats, history | ARGV outcome, problem, history_length, loss
-- Notes the end of a lease (see acquire_recorded.lua). `problem`: the beginning of the body's error   loss: why the lease was lost, or ''
--@entry
--@observe
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entry = entry_of(lock, registry, unpack(holder, 4, 9))
if redis.call('ZREM', registry, entry) == 1 then
  if holder[9] or outcome == 'started' then -- no body has run, or it still runs
    redis.call('HINCRBY', stats, 'released:' .. outcome, '1')
  else
    observe('released:' .. outcome, 'hold_ms', now - holder[7])
    local ended, fate = string.format('%.0f', now), loss ~= '' and loss or 'released'
    if outcome == 'success' then redis.call('HSET', stats, 'last_success', ended) end
    --@logged
  end
end
