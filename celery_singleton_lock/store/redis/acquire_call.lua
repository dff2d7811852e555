-- Names the message of the first in its turn whom nobody has named: its holder has died, or its publication has failed.
if not owner and (redis.call('HGET', waiting, 'quiet_until') or 0) + 0 <= now then
  local named = false
  for rank = 0, free - 1 do
    local one = redis.call('ZRANGE', line, rank, rank)[1]
    if one and not named and one ~= ticket and (redis.call('HGET', waiting, one .. ':message') or '') ~= '' then named = one end
  end
  if named then
    place[6] = redis.call('HGET', waiting, named .. ':message')
    redis.call('HSET', waiting, named .. ':due', now + ARGV[2], named .. ':message', '')
    if is_reserved then
      redis.call('HSET', KEYS[1], 'token', 'queued:line', 'task', first, 'node', '', 'pid', '0', 'since', string.format('%.0f', now),
                 'fence', '0', 'state', 'queued', 'named', 1, 'line', 1)
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
  end
end
