--!df flags=allow-undeclared-keys
-- Deletes a lock if this token owns it; if deliveries wait in line, reserves it for the head of the line.
-- KEYS  1 lock, or the attempt key again where only the token is known   2 attempt   3 completed (see acquire.lua)
-- ARGV  1 token   2 how long (ms) a waiting redelivery waits for the outcome   3 '1' after a success
-- Returns 1 if a redelivery waits for the outcome, plus 2 if the line waits, or 0
--@starts
local lock, finishing = KEYS[1], 'finishing:' .. ARGV[1]
if lock == KEYS[2] then lock = redis.call('GET', KEYS[2]) end
--@queued
local holder = lock and redis.call('HMGET', lock, 'token', 'redelivered', 'line', 'task', 'node', 'pid', 'since', 'fence', 'state') or {}
if holder[1] ~= ARGV[1] then -- another's, or released before: the redelivery waits for another TTL
  return redis.call('GET', KEYS[3]) == finishing and redis.call('PEXPIRE', KEYS[3], ARGV[2]) or 0
end
local line_waits = holder[3] and 2 or 0
--@recorded
--@kept
--@limit
if holder[3] then
  redis.call('HSET', lock, 'token', 'queued:line', 'state', 'queued')
  redis.call('HDEL', lock, 'redelivered')
  redis.call('PEXPIRE', lock, ARGV[2])
  lock = KEYS[2]
end
redis.call('DEL', lock, KEYS[2])
if not holder[2] or ARGV[3] ~= '1' then return line_waits end
redis.call('SET', KEYS[3], finishing, 'PX', ARGV[2])
return 1 + line_waits
