--!df flags=allow-undeclared-keys
-- Deletes a lock if this token owns it. If messages wait in line, names the next one, for which the lock is reserved.
-- KEYS  1 lock, or the attempt key again where only the token is known   2 attempt   3 completed (see acquire.lua)
-- ARGV  1 token   2 how long (ms) a waiting redelivery waits for the outcome, and the lock stays reserved   3 '1' after a success
-- Returns {1 if a redelivery waits for the outcome, else 0; the message of the next in line, or ''}
--@starts
--@begun
--@continued
local lock, finishing = KEYS[1], 'finishing:' .. ARGV[1]
if lock == KEYS[2] then lock = redis.call('GET', KEYS[2]) end
--@queued
local holder = lock and redis.call('HMGET', lock, 'token', 'redelivered', 'line', 'task', 'node', 'pid', 'since', 'fence', 'state') or {}
if holder[1] ~= ARGV[1] then -- another's, or released before: the redelivery waits for another TTL
  --@late
  return {redis.call('GET', KEYS[3]) == finishing and redis.call('PEXPIRE', KEYS[3], ARGV[2]) or 0, ''}
end
local message, lasts = '', ARGV[2]
--@recorded
--@kept
--@limit
if holder[3] then
  redis.call('HDEL', lock, 'redelivered')
  --@next
  lock = KEYS[2] -- the attempt key is deleted instead
end
redis.call('DEL', lock, KEYS[2])
--@next_slot
if not holder[2] or ARGV[3] ~= '1' then return {0, message} end
redis.call('SET', KEYS[3], finishing, 'PX', ARGV[2])
return {1, message}
