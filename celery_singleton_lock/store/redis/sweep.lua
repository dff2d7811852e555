-- Counts leases that have expired.
-- KEYS  1 registry   2 stats   3 history (see acquire.lua)
-- ARGV  1 how many runs the history keeps
-- Returns how many are left that have expired
local registry, stats, history, history_length = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _ = 1, 20 do
--@include swept
end
return redis.call('ZCOUNT', registry, '-inf', now - 1000)
