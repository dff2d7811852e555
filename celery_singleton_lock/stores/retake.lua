-- Takes a lock again that is gone while its body goes on, unless somebody else has it now.
-- KEYS  1 lock   2 attempt
-- ARGV  1 token   2 ttl (ms)   3 task id   4 node   5 pid   6 '1' where the attempt key is wanted   7 '1' where it had expired
-- Returns {what became of it, 1 where this call has taken it}: 1 it is held, 2 held, but lost in between: it had expired, or another
-- has had it since; -1 another's; -2 an operator took it
if redis.call('GET', KEYS[2]) == '' then return {-2, 0} end
local owner = redis.call('HGET', KEYS[1], 'token')
if owner and owner ~= ARGV[1] then return {-1, 0} end
if not owner then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'task', ARGV[3], 'node', ARGV[4], 'pid', ARGV[5],
             'since', string.format('%.0f', now))
  if ARGV[7] == '1' or redis.call('EXISTS', (string.gsub(KEYS[1], '^(.*):lock:', '%1:ran:'))) == 1 then
    redis.call('HSET', KEYS[1], 'lost', 1)
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[6] == '1' then redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[2]) end
return {redis.call('HGET', KEYS[1], 'lost') and 2 or 1, owner and 0 or 1}
