--!df flags=allow-undeclared-keys
-- Takes a message out of the line. Its copies are dropped from now on. If it was its turn, names the next one.
-- KEYS  1 line   2 waiting   3 used (see acquire.lua)   4 lock
-- ARGV  1 ticket   2 for how long (ms) copies are dropped   3 how long (ms) the lock stays reserved   4 how many may hold the lock
-- Not in KEYS: the set of slots, and their locks. Their names follow from the lock's, and only a limit needs them.
-- Returns the message of the next in line, or ''
--@feature limit
local message, lock, lasts, limit = '', KEYS[4], ARGV[3], ARGV[4]
local reserved = redis.call('HMGET', lock, 'token', 'named')
local is_turn = reserved[1] == 'queued:line' and (not reserved[2] or redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1] .. ':due', ARGV[1] .. ':copy', ARGV[1] .. ':task', ARGV[1] .. ':message')
if redis.call('HGET', KEYS[2], 'newest') == ARGV[1] then redis.call('HDEL', KEYS[2], 'newest') end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
if is_turn then
  --@if not limit
  --@include next
  --@end
end
--@if limit
--@include next_slot
--@end
return message
