-- Puts off the expiry of the locks that these tokens own.
-- KEYS  odd: lock, or the attempt key again where only the attempt is known   even: attempt
-- ARGV  odd: token   even: ttl (ms)
-- Returns for each pair 1 done, 2 done, but lost in between (see retake.lua), 0 gone, -1 another's, -2 an operator took it
local answers = {}
for i = 1, #KEYS, 2 do
  local lock, answer = KEYS[i], 0
  if lock == KEYS[i + 1] then lock = redis.call('GET', lock) end
  local has = lock and lock ~= '' and redis.call('HMGET', lock, 'token', 'lost') or {}
  if has[1] == ARGV[i] then
    redis.call('PEXPIRE', lock, ARGV[i + 1])
    redis.call('PEXPIRE', KEYS[i + 1], ARGV[i + 1])
    answer = has[2] and 2 or 1
  elseif redis.call('GET', KEYS[i + 1]) == '' then
    answer = -2
  elseif has[1] then
    answer = -1
  end
  answers[#answers + 1] = answer
end
return answers
