--!df flags=allow-undeclared-keys
-- Reads a part of the registry, and what the locks and lines of its entries say. One text for each entry keeps the reply short.
-- KEYS  1 registry (see acquire.lua)
-- ARGV  1 cursor   2 about how many entries   3 what all keys of the task name begin with
-- Returns {next cursor, now (ms), for each entry: '<when it expires (ms)>\31<duplicates that its holder has met>\31<messages in line>\31<TTL (ms)>\31<when (ms) its process
-- last renewed it, 0 if not since the grant>\31<entry>'};
-- '-' instead of the duplicates if its lock is missing, or another lease's
local cursor, entries = unpack(redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2]))
local time = redis.call('TIME')
local found = {cursor, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))}
for i = 1, #entries, 2 do
  local fence, since, digest, slot = string.match(entries[i], '^[^\31]*\31([^\31]*)\31([^\31]*)\31[^\31]*\31[^\31]*\31([^\31:]*)([^\31]*)')
  local lock = redis.call('HMGET', ARGV[3] .. ':lock:' .. digest .. slot, 'fence', 'since', 'duplicates', 'ttl', 'renewed')
  local duplicates = lock[1] == fence and lock[2] == since and (lock[3] or '0') or '-'
  local waiting = redis.call('ZCARD', ARGV[3] .. ':line:' .. digest)
  local renewed = (lock[4] or '0') .. '\31' .. (lock[5] or '0')
  found[#found + 1] = entries[i + 1] .. '\31' .. duplicates .. '\31' .. waiting .. '\31' .. renewed .. '\31' .. entries[i]
end
return found
