--!df flags=allow-undeclared-keys
-- Frees a lock if this token owns it.
-- KEYS  1 lock, or the attempt key again where only the attempt is known   2 attempt   3 ended
-- ARGV  1 token   2 how long (ms) a waiting copy of the message trusts that this end will be settled   3 '1' after a success
-- Returns 1 where such a copy waits, else 0
local lock = KEYS[1]
if lock == KEYS[2] then lock = redis.call('GET', lock) end
local finishing = 'finishing:' .. ARGV[1]
local has = lock and lock ~= '' and redis.call('HMGET', lock, 'token', 'twin') or {}
if has[1] ~= ARGV[1] then -- another's, or released before: the copy waits for another TTL
  if redis.call('GET', KEYS[3]) ~= finishing then return 0 end
  return redis.call('PEXPIRE', KEYS[3], ARGV[2])
end
redis.call('DEL', lock, KEYS[2])
if not has[2] or ARGV[3] ~= '1' then return 0 end
redis.call('SET', KEYS[3], finishing, 'PX', ARGV[2])
return 1
