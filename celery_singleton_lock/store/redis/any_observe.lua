-- Counts a time (ms) in a histogram: in the field of the lowest bound (s) that it does not exceed, and in the sum (ms).
local function observe(name, time)
  time = math.max(0, math.floor(time))
  local bound = 'inf'
  for _, limit in ipairs({14400, 3600, 900, 300, 60, 15, 5, 1, 0.1}) do
    if time <= limit * 1000 then bound = limit end
  end
  redis.call('HINCRBY', stats, name .. ':' .. bound, 1)
  redis.call('HINCRBY', stats, name .. '_ms', time)
end
