-- Gives back the turn of a message that was named and could not be published: the line has its text again, and the lock is free.
-- KEYS  1 line   2 waiting (see acquire.lua)   3 lock
-- ARGV  1 ticket   2 its text
if redis.call('ZSCORE', KEYS[1], ARGV[1]) and redis.call('HGET', KEYS[2], ARGV[1] .. ':message') == '' then
  redis.call('HSET', KEYS[2], ARGV[1] .. ':message', ARGV[2])
end
local is_reserved = redis.call('HGET', KEYS[3], 'token') == 'queued:line'
if is_reserved and redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1] then redis.call('DEL', KEYS[3]) end
