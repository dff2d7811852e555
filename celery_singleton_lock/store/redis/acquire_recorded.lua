-- KEYS registry, stats, history | ARGV policy, waited, history_length
-- Notes a grant in the registry and the counters.
--   registry: sorted set of the leases that exist -> when (ms) they expire unless renewed; an entry has the fields state, fence,
--     since (ms), pid, node, <digest>[:<slot>], task id; its last one may be any text
--   stats: hash of counters; `locks.stats` tells which   history: list of the last runs, the newest first: when it ended (ms), outcome,
--     error, and the entry
-- ARGV  policy: for a duplicate   waited: how long (ms) the message has waited, '' if it has not   history_length: of runs
--@observe
local state = ARGV[1] == 'queued:' .. ARGV[3] and 'queued' or 'running'
--@listed
local was_reserved = holder[8] and redis.call('ZREM', registry, holder[8]) == 1
if not was_reserved then redis.call('HINCRBY', stats, 'acquired', 1) end
if holder[8] then redis.call('HDEL', KEYS[1], 'duplicates') end -- they were the former holder's
if state == 'running' then
  redis.call('HSET', stats, 'last_start', string.format('%.0f', now))
  if waited ~= '' then observe('wait', waited + 0) end
end
--@swept
