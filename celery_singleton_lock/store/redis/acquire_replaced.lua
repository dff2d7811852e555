-- KEYS replaced
-- Ends a message that another one has replaced, and finds for how long (ms) the holder is asked to stop.
--   replaced: sorted set of queued:<task id> (before a worker started it) and running:<task id> -> until when (ms) that counts
--   lock, also: `stop` (token of the holder that is asked to stop) and `asked` (since when (ms)), see acquire_stop.lua
local asked = redis.call('HMGET', KEYS[1], 'stop', 'asked')
asked = owner and asked[1] == owner and now - asked[2]
if holder[2] ~= ARGV[3] then
  local function is_marked(state) return (redis.call('ZSCORE', replaced, state .. ARGV[3]) or 0) + 0 > now end
  if is_marked('queued:') then return superseded() end
  if ARGV[7] == '1' and is_marked('running:') then return {'replaced'} end
end
