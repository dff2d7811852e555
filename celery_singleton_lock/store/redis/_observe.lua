-- Counts a time (ms) in a histogram: in the field <name>:<lowest bound (s) that it does not exceed>, and in the sum (ms).
local function observe(name, sum, time)
  time = math.max(0, math.floor(time))
  local bound = time <= 100 and '0.1' or time <= 1000 and '1' or time <= 5000 and '5' or time <= 15000 and '15' or time <= 60000 and '60'
    or time <= 300000 and '300' or time <= 900000 and '900' or time <= 3600000 and '3600' or time <= 14400000 and '14400' or 'inf'
  redis.call('HINCRBY', stats, name .. ':' .. bound, '1')
  redis.call('HINCRBY', stats, sum, time)
end
