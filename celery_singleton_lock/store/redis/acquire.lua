--!df flags=allow-undeclared-keys
-- Acquires a lock if it is free, this token's already, or reserved for this task id; otherwise names its holder.
-- KEYS  1 lock: hash of the holder's token (empty in a cooldown), task, node, pid, since (ms), fence; `state` unless a body runs;
--         `ttl` (ms); `renewed`: when (ms) the process of the body last renewed it; `redelivered` once its task id came again; `line` if messages wait in line; `duplicates` that the holder has met
--       2 attempt: name of the token's lock, for a supervisor   4 fence: the task name's last one
--       3 completed: note for redeliveries of a task id: 'finishing:<token>', then 'success'
--       5 recent: sorted set of lock -> fence of its last grant, for a TTL
--       6 revoked: sorted set of token -> time (ms) until which it counts as revoked
--       7 pauses: hash of operators' pauses: a lock key's digest, or '*' for the task name -> until when (ms) nobody starts; and with
--         ':about' after that -> since when (ms), by whom, why
-- ARGV  1 token   2 TTL (ms)   3 task id   4 node   5 pid   6 '1' if supervised   7 '1' if redelivered, else `completed` does not
--       count, as users may use a task id twice
-- Returns {'granted', fence} | {'held' (of an operator's pause, by whom and why as the node), task id, node, pid, age (ms), remaining (ms), fence, state} | {'completed'} | {'revoked'} | {'too_many_starts'}
--@counted
if redis.call('ZSCORE', KEYS[6], ARGV[1]) then return {'revoked'} end
local completed = ARGV[7] == '1' and redis.call('GET', KEYS[3])
if completed == 'success' then return {'completed'} end
if completed then return {'held', ARGV[3], '', '0', 0, redis.call('PTTL', KEYS[3]), '0', false} end
--@limit
local holder = redis.call('HMGET', KEYS[1], 'token', 'task', 'node', 'pid', 'since', 'fence', 'state')
local owner, fence, time = holder[1], holder[6], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
--@entry
local pause_left, pause_about = 0, nil -- how long (ms) a free or reserved lock stays paused; since when, by whom, why
if redis.call('EXISTS', KEYS[7]) == 1 and (not owner or string.sub(owner, 1, 7) == 'queued:') then
  local digest = string.match(KEYS[1], '.*:lock:([^:]*)')
  local pauses = redis.call('HMGET', KEYS[7], '*', digest, '*:about', digest .. ':about')
  pause_left = math.max(0, (pauses[1] or 0) - now, (pauses[2] or 0) - now)
  pause_about = (pauses[1] or 0) + 0 >= (pauses[2] or 0) + 0 and pauses[3] or pauses[4]
end
if pause_left > 0 then
  if owner == 'queued:' .. ARGV[3] then -- its message does not start
    redis.call('DEL', KEYS[1])
    --@freed
  end
  local since, about = string.match(pause_about or '', '^(%d+)\31(.*)')
  owner, fence, holder = '', '0', {'', '', about or '', '0', since or now, '0', 'paused'}
end
--@grace
--@line
if owner and owner ~= ARGV[1] then
  if owner ~= 'queued:' .. ARGV[3] then
    if holder[2] == ARGV[3] then redis.call('HSET', KEYS[1], 'redelivered', 1) end
    --@refused
    local left = pause_left > 0 and pause_left or redis.call('PTTL', KEYS[1])
    return {'held', holder[2], holder[3], holder[4], now - holder[5], left, fence, holder[7]}
  end
  redis.call('HDEL', KEYS[1], 'state', 'stop')
  owner = nil
end
if not owner then
--@starts
  local since, number = string.format('%.0f', now), math.max((redis.call('GET', KEYS[4]) or 0) + 1, time[1] * 1000000 + time[2])
  fence = string.format('%.0f', number)
  redis.call('SET', KEYS[4], fence)
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', number - ARGV[2] * 1000))
  redis.call('ZADD', KEYS[5], fence, KEYS[1])
  redis.call('PEXPIRE', KEYS[5], ARGV[2])
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'task', ARGV[3], 'node', ARGV[4], 'pid', ARGV[5],
             'since', since, 'fence', fence, 'ttl', ARGV[2])
  --@queued
  --@recorded
end
--@started
--@begun
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[6] == '1' then redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[2]) end
--@slot
return {'granted', fence}
