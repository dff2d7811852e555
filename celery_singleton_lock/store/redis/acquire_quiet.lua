-- ARGV quiet, max_quiet
-- A debounce: the head of the line is not started before no newcomer came for `quiet` ms, but at most `max_quiet` ms after the first.
--   waiting, also: `quiet_until` (ms), and `quiet_latest` (ms), which it does not exceed
-- Once it is over and the lock is reserved for the head, newcomers do not prolong it. A newcomer joins with a second request. If the
-- head has started since the first one, that request begins another quiet time.
local quiet_left = math.max(0, (redis.call('HGET', waiting, 'quiet_until') or 0) - now)
local latest = redis.call('HGET', waiting, 'quiet_latest')
if (ticket == '' or (room ~= '' and not latest)) and owner ~= ARGV[1] and (owner ~= 'queued:line' or quiet_left > 0) then
  latest = head and latest or now + max_quiet
  quiet_left = math.max(0, math.min(now + quiet, latest) - now)
  redis.call('HSET', waiting, 'quiet_latest', latest, 'quiet_until', now + quiet_left)
  redis.call('PEXPIRE', waiting, math.max(max_quiet + window, redis.call('PTTL', waiting)))
end
