-- Takes a lock where it is free, or this token's already; else tells who has it.
-- KEYS  1 lock: hash of token, task, node, pid, since (ms), fence, twin   2 attempt: key of its lock, or '' once an operator took it
--       3 ended: 'finishing:<token>' or 'success' of another attempt with the same task id and signature
--       4 fence: the last one of this task name   5 recent: sorted set, lock -> fence of its last grant, of the last TTL
-- ARGV  1 token   2 ttl (ms)   3 task id   4 node   5 pid   6 '1' where the attempt key is wanted
--       7 '1' where the message was delivered before: for others `ended` says nothing, as a user may use a task id twice
-- Returns {'granted', fence} | {'revoked'} | {'completed'} | {'held', task id, node, pid, age (ms), remaining (ms), fence}
if redis.call('EXISTS', KEYS[2], KEYS[3]) > 0 then
  if redis.call('GET', KEYS[2]) == '' then return {'revoked'} end
  local ended = ARGV[7] == '1' and redis.call('GET', KEYS[3])
  if ended == 'success' then return {'completed'} end
  if ended then return {'held', ARGV[3], '', '0', 0, redis.call('PTTL', KEYS[3]), '0'} end
end
local time = redis.call('TIME')
local has = redis.call('HMGET', KEYS[1], 'token', 'task', 'node', 'pid', 'since', 'fence')
local fence = has[6]
if has[1] and has[1] ~= ARGV[1] then
  if has[2] == ARGV[3] then redis.call('HSET', KEYS[1], 'twin', 1) end
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  return {'held', has[2], has[3], has[4], now - has[5], redis.call('PTTL', KEYS[1]), fence}
end
if not has[1] then
  local number = math.max((redis.call('GET', KEYS[4]) or 0) + 1, time[1] * 1000000 + time[2])
  fence = string.format('%.0f', number)
  redis.call('SET', KEYS[4], fence)
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', number - ARGV[2] * 1000))
  redis.call('ZADD', KEYS[5], fence, KEYS[1])
  redis.call('PEXPIRE', KEYS[5], ARGV[2])
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'task', ARGV[3], 'node', ARGV[4], 'pid', ARGV[5],
             'since', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 'fence', fence)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[6] == '1' then redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[2]) end
return {'granted', fence}
