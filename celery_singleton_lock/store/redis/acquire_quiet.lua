-- ARGV quiet, max_quiet
-- A debounce: the head of the line is not started before no newcomer came for `quiet` ms, but at most `max_quiet` ms after the first.
--   waiting, also: `quiet_until` (ms), and `quiet_latest` (ms), which it does not exceed
if ticket == '' and owner ~= ARGV[1] and owner ~= 'queued:line' then
  local latest = head and redis.call('HGET', waiting, 'quiet_latest') or now + max_quiet
  redis.call('HSET', waiting, 'quiet_latest', latest, 'quiet_until', math.min(now + quiet, latest))
  redis.call('PEXPIRE', waiting, math.max(max_quiet + window, redis.call('PTTL', waiting)))
end
local quiet_left = math.max(0, (redis.call('HGET', waiting, 'quiet_until') or 0) - now)
