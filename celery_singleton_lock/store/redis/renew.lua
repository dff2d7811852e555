--!df flags=allow-undeclared-keys
-- Puts off the expiry of the locks that these tokens own.
-- KEYS  odd: lock, or the attempt key again where only the attempt is known   even: attempt
-- ARGV  odd: token   even: ttl (ms)
-- Returns for each pair 1 done, 0 gone, -1 another's, -2 an operator took it
local answers = {}
for i = 1, #KEYS, 2 do
  local lock, answer = KEYS[i], 0
  if lock == KEYS[i + 1] then lock = redis.call('GET', lock) end
  local owner = lock and lock ~= '' and redis.call('HGET', lock, 'token')
  if owner == ARGV[i] then
    redis.call('PEXPIRE', lock, ARGV[i + 1])
    redis.call('PEXPIRE', KEYS[i + 1], ARGV[i + 1])
    answer = 1
  elseif redis.call('GET', KEYS[i + 1]) == '' then
    answer = -2
  elseif owner then
    answer = -1
  end
  answers[#answers + 1] = answer
end
return answers
