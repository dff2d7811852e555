-- KEYS primary | ARGV grace
-- Keeps a lock that is missing free for a while (ms), as the server may have lost it, and a living holder reacquires it until then. A note in the
-- data tells which process has served them: it is missing after an empty restart or FLUSHALL, and names another one after any other restart
-- or a change of the primary. Returns {'grace', how long (ms) no new lease is granted}.
--   primary: hash of the server's run id, and since when (ms) this task name is known to it
if not owner then
  local id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
  local known = redis.call('HMGET', primary, 'id', 'since')
  if known[1] ~= id or known[2] + 0 > now then -- else its clock was set back
    known[2] = now
    redis.call('HSET', primary, 'id', id, 'since', string.format('%.0f', now))
  end
  local left = known[2] + grace - now
  if left > 0 then return {'grace', left} end
end
