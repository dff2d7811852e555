-- KEYS registry, stats, history | ARGV outcome, problem, history_length
-- Notes the end of a lease (see acquire_recorded.lua). `problem`: the beginning of the body's error.
--@observe
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if holder[4] and redis.call('ZREM', registry, holder[4]) == 1 then
  redis.call('HINCRBY', stats, 'released:' .. outcome, 1)
  if string.sub(holder[4], 1, 8) == 'running\31' then
    observe('hold', now - holder[5])
    if outcome == 'success' then redis.call('HSET', stats, 'last_success', string.format('%.0f', now)) end
    if history_length ~= '0' then
      redis.call('LPUSH', history, string.format('%.0f\31%s\31%s\31%s', now, outcome, problem, holder[4]))
      redis.call('LTRIM', history, 0, history_length - 1)
    end
  end
end
