-- KEYS line, waiting, used | ARGV ticket, copy, next_copy, room, due, message, window, gives_way
-- The line of deliveries that wait for the lock: a free lock is for its head, and for a message of the line that was published and is
-- here. So a message that spent its turn in a busy queue runs, although it may have lost its place meanwhile.
--   line: sorted set of ticket -> time of joining (us)
--   waiting: hash of <ticket>:due (until when (ms) its next copy comes), :copy (number of that copy), :task, :message; and `newest`: ticket of the
--     message whose place others take
--   used: sorted set of ticket and <ticket>:<copy that started it> -> until when (ms) other copies are dropped
-- ARGV  ticket, copy: '' and '0' if the message has not waited   next_copy: number of the copy that was published with a delay
--       room: '' not to join, how many may wait, or 'all' to take the place of `newest`   due: in how many ms the next copy comes at the latest
--       window: for how many ms late copies are dropped   gives_way: '1' if it becomes `newest`
-- A message keeps its place while its text is here. If it has none, it loses its place when its copy does not come.
-- A request that finds the lock free, and others in their turn whom nobody has named, names the first of them: see acquire_call.lua.
-- Returns also {'dropped'} (the message has started, or a later copy of it comes) | {'superseded', task id of the head}; and after the holder's state
-- {how many wait, task id of the head, this message's place from 1 if it waits, times of other parts or 0, the message that is named}
local newest = redis.call('HGET', waiting, 'newest')
local function leave(one)
  redis.call('ZREM', line, one)
  redis.call('HDEL', waiting, one .. ':due', one .. ':copy', one .. ':task', one .. ':message', one == newest and 'newest' or '')
end
local function use(one, by)
  redis.call('ZADD', used, now + window, one, now + window, one .. ':' .. by)
  redis.call('ZREMRANGEBYSCORE', used, '-inf', now)
  redis.call('PEXPIRE', used, window)
end
local function has_lapsed(one)
  local fields = redis.call('HMGET', waiting, one .. ':message', one .. ':due')
  return (fields[1] or '') == '' and (fields[2] or 0) + 0 < now
end
local function superseded()
  return {'superseded', newest and redis.call('HGET', waiting, newest .. ':task') or ''}
end
if ticket ~= '' and redis.call('ZSCORE', used, ticket) and not redis.call('ZSCORE', used, ticket .. ':' .. copy) then
  return redis.call('ZSCORE', used, ticket .. ':superseded') and superseded() or {'dropped'}
end
--@waits
--@replaced
if room == 'all' and newest and newest ~= ticket then
  local is_own = redis.call('HGET', waiting, newest .. ':task') == ARGV[3] -- another delivery of the message: it is not skipped
  use(newest, is_own and '' or 'superseded')
  leave(newest)
end
local head = redis.call('ZRANGE', line, 0, 0)[1]
while head and head ~= ticket and has_lapsed(head) do
  leave(head) -- it joins again should its copy come after all
  head = redis.call('ZRANGE', line, 0, 0)[1]
end
--@stop
--@quiet
local is_turn = not owner or owner == 'queued:line'
if ARGV[1] == 'queued:line' and owner then is_turn = is_turn and not redis.call('HGET', KEYS[1], 'named') end
is_turn = is_turn and (not head or head == ticket)
local free, is_reserved = 1, true -- how many may start; whether the lock is reserved for a message that is named
--@turns
local is_here = ticket ~= '' and room == '' and ARGV[1] ~= 'queued:line'
is_turn = is_turn or (is_here and (not owner or owner == 'queued:line'))
--@ripe
if is_turn and ARGV[1] == 'queued:line' then
  -- A copy in its turn publishes its message, which has a place until it has spent its turn. Nobody else is to publish it.
  if not redis.call('ZSCORE', line, ticket) then redis.call('ZADD', line, time[1] * 1000000 + time[2], ticket) end
  redis.call('HSET', waiting, ticket .. ':due', now + ARGV[2], ticket .. ':copy', copy, ticket .. ':task', ARGV[3], ticket .. ':message', '')
  redis.call('PEXPIRE', line, ARGV[2] + window)
  redis.call('PEXPIRE', waiting, ARGV[2] + window)
end
--@named
if is_turn and owner then
  redis.call('HDEL', KEYS[1], 'state', 'named', 'redelivered', 'stop') -- of what came before this start
  owner = nil
elseif not is_turn and (owner ~= ARGV[1] or owner == 'queued:line') and owner ~= 'queued:' .. ARGV[3] then
  local waits = redis.call('ZSCORE', line, ticket)
  if waits and copy + 0 < (redis.call('HGET', waiting, ticket .. ':copy') or 0) + 0 and room == '' then return {'dropped'} end
  if waits and room == '' and ARGV[1] == 'queued:line' and not (owner == 'queued:line' and head == ticket) then -- its copy goes on
    redis.call('HSET', waiting, ticket .. ':due', now + due, ticket .. ':copy', copy)
    redis.call('PEXPIRE', line, math.max(due + window, redis.call('PTTL', line)))
    redis.call('PEXPIRE', waiting, math.max(due + window, redis.call('PTTL', waiting)))
  end
  if room ~= '' and (waits or room == 'all' or redis.call('ZCARD', line) < room + 0) then
    if not waits then redis.call('ZADD', line, time[1] * 1000000 + time[2], ticket) end
    waits, head = true, head or ticket
    redis.call('ZREM', used, ticket, ticket .. ':' .. copy)
    redis.call('HSET', waiting, ticket .. ':due', now + due, ticket .. ':copy', next_copy, ticket .. ':task', ARGV[3],
               ticket .. ':message', message)
    if gives_way == '1' then redis.call('HSET', waiting, 'newest', ticket) end
    redis.call('PEXPIRE', line, due + window)
    redis.call('PEXPIRE', waiting, due + window)
    if owner and pause_left == 0 then redis.call('HSET', KEYS[1], 'line', 1) end
  end
  local first = head and redis.call('HGET', waiting, head .. ':task') or false
  local place = {redis.call('ZCARD', line), first, waits and redis.call('ZRANK', line, ticket) + 1 or false, 0, 0, ''}
  --@left
  --@asked
  --@call
  --@refused
  if not owner then return {'held', first or '', '', '0', 0, 0, '0', 'queued', unpack(place)} end
  if holder[2] == ARGV[3] then redis.call('HSET', KEYS[1], 'redelivered', 1) end
  local left = pause_left > 0 and pause_left or redis.call('PTTL', KEYS[1])
  return {'held', holder[2], holder[3], holder[4], now - holder[5], left, fence, holder[7], unpack(place)}
end
