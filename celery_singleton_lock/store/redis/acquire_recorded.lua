-- KEYS registry, stats, history | ARGV policy, waited, history_length
-- Notes a grant in the registry and the counters. A reservation for the head of a line is none: its message is counted when it starts.
--   registry: sorted set of the leases that exist -> when (ms) they expire unless renewed; an entry has the fields state, fence,
--     since (ms), pid, node, <digest>[:<slot>], task id; its last one may be any text
--   stats: hash of counters (`counters_of` in records.py)   history: list of the last runs, the newest first: when it ended (ms), outcome,
--     error, what became of the lease, and the entry
-- Counters grow by the text '1': a number would have to be formatted first.
-- ARGV  policy: for a duplicate   waited: how long (ms) the message has waited, '' if it has not   history_length: of runs
if ARGV[1] ~= 'queued:line' then
  local state = ARGV[1] == 'queued:' .. ARGV[3] and 'queued' or 'running'
  redis.call('ZADD', registry, now + ARGV[2], entry_of(KEYS[1], registry, ARGV[3], ARGV[4], ARGV[5], since, fence, state))
  local was_reserved = holder[2] and redis.call('ZREM', registry, entry_of(KEYS[1], registry, unpack(holder, 2, 7))) == 1
  if not was_reserved and redis.call('HINCRBY', stats, 'acquired', '1') % 8 == 0 then
    --@swept
  end
  if holder[2] and holder[2] ~= ARGV[3] then redis.call('HDEL', KEYS[1], 'duplicates') end -- they were the former holder's
  if state == 'running' then redis.call('HSET', stats, 'last_start', since) end
  if state == 'running' and waited ~= '' then
    --@observe
    observe('wait', 'wait_ms', waited)
  end
end
