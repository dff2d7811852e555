--!df flags=allow-undeclared-keys
-- Acquires a lock if it is free, this token's already, or reserved for this task id; otherwise names its holder.
-- KEYS  1 lock: hash of the holder's token (empty in a cooldown), task, node, pid, since (ms), fence; `state` unless a body runs;
--         `ttl` (ms); `renewed`: when (ms) the process of the body last renewed it; `redelivered` once its task id came again; `identity` of its message (below), where a line counts; `line` if messages wait in line; `duplicates` that the holder has met
--       2 attempt: name of the token's lock, for a supervisor   4 fence: the task name's last one
--       3 completed: note for redeliveries of a task id: 'finishing:<token>', then 'success'
--       5 recent: sorted set of lock -> fence of its last grant, for a TTL
--       6 revoked: sorted set of token -> time (ms) until which it counts as revoked
--       7 pauses: hash of operators' pauses: a lock key's digest, or '*' for the task name -> until when (ms) nobody starts; and with
--         ':about' after that -> since when (ms), by whom, why
-- ARGV  1 token   2 TTL (ms)   3 task id   4 node   5 pid   6 '1' if supervised   7 '1' if redelivered, else `completed` does not
--       count, as users may use a task id twice
-- Returns {'granted', fence} | {'held' (of an operator's pause, by whom and why as the node), task id, node, pid, age (ms), remaining (ms), fence, state} | {'completed'} | {'revoked'} | {'too_many_starts'}
-- Of the features, `crashed` goes with `starts`, and `stop`, `debounce`, `dispatch` and `body` with `line`.
--@feature limit  KEYS slots | ARGV slot_limit
--@feature records  KEYS registry, stats, history | ARGV policy, waited, history_length
--@feature grace  KEYS primary | ARGV grace
--@feature line  KEYS line, waiting, used | ARGV identity, ticket, copy, next_copy, room, due, message, window, gives_way
--@feature stop  KEYS replaced
--@feature debounce  ARGV quiet, max_quiet
--@feature dispatch
--@feature starts  KEYS starts | ARGV start_limit, start_window
--@feature crashed
--@feature queued
--@feature body
--@feature begun  KEYS begun | ARGV begun_ttl
--@if line
-- Tells of a message with this one's task id whether it is this one. After a loss of data, nothing tells, and it is taken for this one.
local function is_same(other) return identity == '' or (other or '') == '' or other == identity end
--@end
if redis.call('ZSCORE', KEYS[6], ARGV[1]) then return {'revoked'} end
local completed = ARGV[7] == '1' and redis.call('GET', KEYS[3])
if completed == 'success' then return {'completed'} end
if completed then return {'held', ARGV[3], '', '0', 0, redis.call('PTTL', KEYS[3]), '0', false} end
--@if limit
-- Chooses the slot that this request concerns, and lets the verb go on with it as its lock: this token's slot; else the first
-- one of its task id, a redelivery; else the oldest one if `slot_limit` slots are held; else the first free one.
-- Slot 0 is the lock itself, slot n is <lock>:<n>. `slots` is the set of the numbers above 0 that may be held. Slots below the limit are
-- found without it too. It tells which slots are held above the limit, by requests with a higher one. It lives as long as the leases
-- in these slots, as grants, renewals and reacquiring extend it. What does not hold: if the set is lost, requests with a lower limit do not
-- count the slots above that limit until they were renewed or reacquired. A request without a limit counts slot 0 alone.
local slot, live = 0, 0 -- live: how many slots are held
do
  local first, limit, held, own, same, oldest, least = KEYS[1], slot_limit + 0, {}
  local function key_of(number) return number == 0 and first or string.format('%s:%d', first, number) end
  local function is_held(number)
    if held[number] == nil then
      local holder = redis.call('HMGET', key_of(number), 'token', 'task', 'fence')
      held[number] = holder[1]
      if holder[1] then
        live = live + 1
        if holder[1] == ARGV[1] then own = number elseif holder[2] == ARGV[3] then same = math.min(same or number, number) end
        if not least or holder[3] + 0 < least then oldest, least = number, holder[3] + 0 end
      end
    end
    return held[number]
  end
  is_held(0)
  for _, number in ipairs(redis.call('SMEMBERS', slots)) do
    if not is_held(number + 0) then redis.call('SREM', slots, number) end
  end
  while live < limit and is_held(slot) do slot = slot + 1 end
  slot = own or same or (live < limit and slot) or oldest
  KEYS[1] = key_of(slot)
end
--@end
local holder = redis.call('HMGET', KEYS[1], 'token', 'task', 'node', 'pid', 'since', 'fence', 'state')
local owner, fence, time = holder[1], holder[6], redis.call('TIME')
local is_own = holder[2] == ARGV[3] -- whether another delivery of this message holds the lock
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local pause_left, pause_about = 0, nil -- how long (ms) a free or reserved lock stays paused; since when, by whom, why
--@if records
--@include entry
local function count_unstarted() -- a reservation that has ended without a start
  if holder[2] and redis.call('ZREM', registry, entry_of(KEYS[1], registry, unpack(holder, 2, 7))) == 1 then
    redis.call('HINCRBY', stats, 'released:other', '1')
  end
end
-- Counts a duplicate, also for its holder, or a redelivery of the message that holds the lock. A call that is published during an
-- operator's pause is counted when it starts; a copy in line is no redelivery. A free lock, and nobody in line (`first`): it waits for quiet.
local function count_duplicate(first)
  if owner and is_own then
    if ARGV[1] ~= 'queued:line' then redis.call('HINCRBY', stats, 'redelivery_checks', '1') end
  elseif policy ~= '' and (owner or first) and (pause_left == 0 or string.sub(ARGV[1], 1, 7) ~= 'queued:') then
    redis.call('HINCRBY', stats, 'duplicates:' .. policy, '1')
    if owner and pause_left == 0 then redis.call('HINCRBY', KEYS[1], 'duplicates', '1') end
  end
end
--@end
if redis.call('EXISTS', KEYS[7]) == 1 and (not owner or string.sub(owner, 1, 7) == 'queued:') then
  local digest = string.match(KEYS[1], '.*:lock:([^:]*)')
  local pauses = redis.call('HMGET', KEYS[7], '*', digest, '*:about', digest .. ':about')
  pause_left = math.max(0, (pauses[1] or 0) - now, (pauses[2] or 0) - now)
  pause_about = (pauses[1] or 0) + 0 >= (pauses[2] or 0) + 0 and pauses[3] or pauses[4]
end
if pause_left > 0 then
  if owner == 'queued:' .. ARGV[3] then -- its message does not start
    redis.call('DEL', KEYS[1])
    --@if records
    count_unstarted()
    --@end
  end
  local since, about = string.match(pause_about or '', '^(%d+)\31(.*)')
  owner, fence, is_own, holder = '', '0', false, {'', '', about or '', '0', since or now, '0', 'paused'}
end
--@if grace
-- Keeps a lock that is missing free for a while (ms), as the server may have lost it, and a living holder reacquires it until then. A note in the
-- data tells which process has served them: it is missing after an empty restart or FLUSHALL, and names another one after any other restart
-- or a change of the primary. Returns {'grace', how long (ms) no new lease is granted}.
--   primary: hash of the server's run id, and since when (ms) this task name is known to it
if not owner then
  local id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
  local known = redis.call('HMGET', primary, 'id', 'since')
  if known[1] ~= id or known[2] + 0 > now then -- else its clock was set back
    known[2] = now
    redis.call('HSET', primary, 'id', id, 'since', string.format('%.0f', now))
  end
  local left = known[2] + grace - now
  if left > 0 then return {'grace', left} end
end
--@end
--@if line
-- The line of deliveries that wait for the lock: a free lock is for its head, and for a message of the line that was published and is
-- here. So a message that spent its turn in a busy queue runs, although it may have lost its place meanwhile.
--   line: sorted set of ticket (<identity>.<chance>) -> time of joining (us)
--   waiting: hash of <ticket>:due (until when (ms) its next copy comes), :copy (number of that copy), :task, :message; and `newest`: ticket of the
--     message whose place others take
--   used: sorted set of ticket and <ticket>:<copy that started it> -> until when (ms) other copies are dropped
-- ARGV  identity: of the message, as others may have its task id; '' if it is not known   ticket, copy: '' and '0' if the message has not waited
--       next_copy: number of the copy that was published with a delay
--       room: '' not to join, how many may wait, or 'all' to take the place of `newest`   due: in how many ms the next copy comes at the latest
--       window: for how many ms late copies are dropped   gives_way: '1' if it becomes `newest`
-- A message keeps its place while its text is here. If it has none, it loses its place when its copy does not come.
-- A request that finds the lock free, and others in their turn whom nobody has named, names the first of them (`dispatch`).
-- Returns also {'dropped'} (the message has started, or a later copy of it comes) | {'superseded', task id of the head}; and after the holder's state
-- {how many wait, task id of the head, this message's place from 1 if it waits, times of other features or 0, the message that is named,
-- whether another delivery of this message is the holder, and whether it is the head}
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
if is_own and owner ~= ARGV[1] and owner ~= 'queued:' .. ARGV[3] then
  is_own = is_same(redis.call('HGET', KEYS[1], 'identity'))
  if is_own and not holder[7] and ARGV[1] == 'queued:line' then return {'dropped'} end
end
--@if records
-- A message of the line has waited since it joined.
if ticket ~= '' then
  local joined = redis.call('ZSCORE', line, ticket)
  if joined then waited = now - joined / 1000 end
end
--@end
--@if stop
-- Ends a message that another one has replaced, and finds for how long (ms) the holder is asked to stop.
--   replaced: sorted set of queued:<task id> (before a worker started it) and running:<task id> -> until when (ms) that counts
--   lock, also: `stop` (token of the holder that is asked to stop) and `asked` (since when (ms))
local asked = redis.call('HMGET', KEYS[1], 'stop', 'asked')
asked = owner and asked[1] == owner and now - asked[2]
if holder[2] ~= ARGV[3] then
  local function is_marked(state) return (redis.call('ZSCORE', replaced, state .. ARGV[3]) or 0) + 0 > now end
  if is_marked('queued:') then return superseded() end
  if ARGV[7] == '1' and is_marked('running:') then return {'replaced'} end
end
--@end
if room == 'all' and newest and newest ~= ticket then
  local has_id = redis.call('HGET', waiting, newest .. ':task') == ARGV[3] -- nothing is stored under it before this message ends
  use(newest, has_id and '' or 'superseded')
  leave(newest)
end
local head = redis.call('ZRANGE', line, 0, 0)[1]
while head and head ~= ticket and has_lapsed(head) do
  leave(head) -- it joins again should its copy come after all
  head = redis.call('ZRANGE', line, 0, 0)[1]
end
--@if stop
-- Asks a holder that runs to stop, or takes the place of a message with a reservation. A cooldown and a pause stay.
if room ~= '' and owner and owner ~= '' and owner ~= ARGV[1] and owner ~= 'queued:line' and holder[2] ~= ARGV[3] then
  local lasts = math.max(window, redis.call('PTTL', KEYS[1]))
  redis.call('ZREMRANGEBYSCORE', replaced, '-inf', now)
  redis.call('ZADD', replaced, now + lasts, (holder[7] or 'running') .. ':' .. holder[2])
  redis.call('PEXPIRE', replaced, math.max(lasts, redis.call('PTTL', replaced)))
  if holder[7] then
    redis.call('DEL', KEYS[1])
    --@if records
    count_unstarted()
    --@end
    owner = nil
  elseif not asked then
    redis.call('HSET', KEYS[1], 'stop', owner, 'asked', now)
  end
end
--@end
--@if debounce
-- A debounce: the head of the line is not started before no newcomer came for `quiet` ms, but at most `max_quiet` ms after the first.
--   waiting, also: `quiet_until` (ms), and `quiet_latest` (ms), which it does not exceed
-- Once it is over and the lock is reserved for the head, newcomers do not prolong it. A newcomer joins with a second request. If the
-- head has started since the first one, that request begins another quiet time.
local quiet_left = math.max(0, (redis.call('HGET', waiting, 'quiet_until') or 0) - now)
local latest = redis.call('HGET', waiting, 'quiet_latest')
if (ticket == '' or (room ~= '' and not latest)) and owner ~= ARGV[1] and (owner ~= 'queued:line' or quiet_left > 0) then
  latest = head and latest or now + max_quiet
  quiet_left = math.max(0, math.min(now + quiet, latest) - now)
  redis.call('HSET', waiting, 'quiet_latest', latest, 'quiet_until', now + quiet_left)
  redis.call('PEXPIRE', waiting, math.max(max_quiet + window, redis.call('PTTL', waiting)))
  redis.call('PEXPIRE', line, math.max(max_quiet + window, redis.call('PTTL', line)))
end
--@end
local is_turn = not owner or owner == 'queued:line'
if ARGV[1] == 'queued:line' and owner then is_turn = is_turn and not redis.call('HGET', KEYS[1], 'named') end
is_turn = is_turn and (not head or head == ticket)
local free, is_reserved = 1, true -- how many may start; whether the lock is reserved for a message that is named
--@if limit
-- A line before several slots: the turn has come for as many of the first in line as slots are free. No slot is reserved for them, as a
-- newcomer's rank is behind all that wait.
if not owner then
  local rank, one = 0, head
  free, is_reserved = slot_limit - live, false
  while one and one ~= ticket and rank < free do
    if has_lapsed(one) then leave(one) else rank = rank + 1 end
    one = redis.call('ZRANGE', line, rank, rank)[1]
  end
  is_turn = rank < free
end
--@end
local is_here = ticket ~= '' and room == '' and ARGV[1] ~= 'queued:line'
is_turn = is_turn or (is_here and (not owner or owner == 'queued:line'))
--@if debounce
-- Until the quiet time is over, nobody gets a free lock.
is_turn = is_turn and quiet_left == 0
--@end
if is_turn and ARGV[1] == 'queued:line' then
  -- A copy in its turn publishes its message, which has a place until it has spent its turn. Nobody else is to publish it.
  if not redis.call('ZSCORE', line, ticket) then redis.call('ZADD', line, time[1] * 1000000 + time[2], ticket) end
  redis.call('HSET', waiting, ticket .. ':due', now + ARGV[2], ticket .. ':copy', copy, ticket .. ':task', ARGV[3], ticket .. ':message', '')
  redis.call('PEXPIRE', line, ARGV[2] + window)
  redis.call('PEXPIRE', waiting, ARGV[2] + window)
end
--@if limit
-- A copy in its turn acquires no slot: its message keeps the place in line until it starts.
if is_turn and not owner and ARGV[1] == 'queued:line' then return {'granted', '0', 0} end
--@end
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
  local place = {redis.call('ZCARD', line), first, waits and redis.call('ZRANK', line, ticket) + 1 or false, 0, 0, '', is_own,
                 head and first == ARGV[3] and is_same(string.match(head, '^[^.]*')) or false}
  --@if debounce
  -- Answers also how long (ms) the quiet time lasts.
  place[4] = quiet_left
  --@end
  --@if stop
  -- Answers also for how long (ms) the holder is asked to stop.
  place[5] = asked or 0
  --@end
  --@if dispatch
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
                   'fence', '0', 'state', 'queued', 'named', 1, 'line', 1, 'identity', string.match(head, '^[^.]*'))
        redis.call('PEXPIRE', KEYS[1], ARGV[2])
      end
    end
  end
  --@end
  --@if records
  count_duplicate(first)
  --@end
  if not owner then
    place[7] = place[8] -- the head stands for the holder
    return {'held', first or '', '', '0', 0, 0, '0', 'queued', unpack(place)}
  end
  if is_own then redis.call('HSET', KEYS[1], 'redelivered', 1) end
  local left = pause_left > 0 and pause_left or redis.call('PTTL', KEYS[1])
  return {'held', holder[2], holder[3], holder[4], now - holder[5], left, fence, holder[7], unpack(place)}
end
--@end
if owner and owner ~= ARGV[1] then
  if owner ~= 'queued:' .. ARGV[3] then
    if is_own then redis.call('HSET', KEYS[1], 'redelivered', 1) end
    --@if records
    count_duplicate()
    --@end
    local left = pause_left > 0 and pause_left or redis.call('PTTL', KEYS[1])
    return {'held', holder[2], holder[3], holder[4], now - holder[5], left, fence, holder[7]}
  end
  redis.call('HDEL', KEYS[1], 'state', 'stop')
  owner = nil
end
if not owner then
--@if starts
  -- starts: sorted set of token -> time (ms) of a start that counts   start_limit: of them   start_window: how long (ms) each counts
  redis.call('ZREMRANGEBYSCORE', starts, '-inf', string.format('%.0f', now - start_window))
  local too_many = redis.call('ZCARD', starts) >= start_limit + 0 and not redis.call('ZSCORE', starts, ARGV[1])
  --@if crashed
  -- With several holders, starts that still run are no crashes. A lease of a slot has an attempt key as long as it lives.
  if too_many then
    local crashed, prefix = 0, string.sub(KEYS[2], 1, -1 - #ARGV[1])
    for _, token in ipairs(redis.call('ZRANGE', starts, 0, -1)) do
      if redis.call('EXISTS', prefix .. token) == 0 then crashed = crashed + 1 end
    end
    too_many = crashed >= start_limit + 0
  end
  --@end
  if too_many then
    if redis.call('HGET', KEYS[1], 'token') == 'queued:line' then
      redis.call('HSET', KEYS[1], 'state', 'queued') -- for the next in line, when this message leaves it
    else
      redis.call('DEL', KEYS[1]) -- a reservation of this message
      --@if records
      count_unstarted()
      --@end
    end
    --@if records
    redis.call('HINCRBY', stats, 'starts_refused', '1')
    --@end
    return {'too_many_starts'}
  end
  redis.call('ZADD', starts, string.format('%.0f', now), ARGV[1])
  redis.call('PEXPIRE', starts, start_window)
--@end
  local since, number = string.format('%.0f', now), math.max((redis.call('GET', KEYS[4]) or 0) + 1, time[1] * 1000000 + time[2])
  fence = string.format('%.0f', number)
  redis.call('SET', KEYS[4], fence)
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', number - ARGV[2] * 1000))
  redis.call('ZADD', KEYS[5], fence, KEYS[1])
  redis.call('PEXPIRE', KEYS[5], ARGV[2])
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'task', ARGV[3], 'node', ARGV[4], 'pid', ARGV[5],
             'since', since, 'fence', fence, 'ttl', ARGV[2])
  --@if queued
  -- The lock is a reservation: no worker has started the message.
  redis.call('HSET', KEYS[1], 'state', 'queued')
  --@if line
  redis.call('HSET', KEYS[1], 'identity', identity)
  --@end
  --@end
  --@if records
  -- Notes a grant in the registry and the counters. A reservation for the head of a line is none: its message is counted when it starts.
  --   registry: sorted set of the leases that exist -> when (ms) they expire unless renewed; an entry has the fields state, fence,
  --     since (ms), pid, node, <digest>[:<slot>], task id; its last one may be any text
  --   stats: hash of counters (`counters_of` in records.py)   history: list of the last runs, the newest first: when it ended (ms), outcome,
  --     error, what became of the lease, and the entry
  -- Counters grow by the text '1': a number would have to be formatted first.
  -- ARGV  policy: for a duplicate   waited: how long (ms) the message has waited, '' if it has not   history_length: of runs
  if ARGV[1] ~= 'queued:line' then
    local state = ARGV[1] == 'queued:' .. ARGV[3] and 'queued' or 'running'
    redis.call('ZADD', registry, now + ARGV[2], entry_of(KEYS[1], registry, ARGV[3], ARGV[4], ARGV[5], since, fence, state))
    local was_reserved = holder[2] and redis.call('ZREM', registry, entry_of(KEYS[1], registry, unpack(holder, 2, 7))) == 1
    if not was_reserved and redis.call('HINCRBY', stats, 'acquired', '1') % 8 == 0 then
      --@include swept
    end
    if holder[2] and holder[2] ~= ARGV[3] then redis.call('HDEL', KEYS[1], 'duplicates') end -- they were the former holder's
    if state == 'running' then redis.call('HSET', stats, 'last_start', since) end
    if state == 'running' and waited ~= '' then
      --@include observe
      observe('wait', 'wait_ms', waited)
    end
  end
  --@end
end
--@if body
-- The message leaves the line, and its other copies are dropped from now on.
if ticket ~= '' then
  leave(ticket)
  use(ticket, copy)
end
redis.call('HSET', KEYS[1], 'identity', identity)
--@if debounce
-- The quiet time is over: a newcomer that joins from now on begins another.
redis.call('HDEL', waiting, 'quiet_until', 'quiet_latest')
--@end
local first = redis.call('ZRANGE', line, 0, 0)[1]
-- Another delivery of this message leaves the line, too: nobody is to be skipped for it.
if first and redis.call('HGET', waiting, first .. ':task') == ARGV[3] and is_same(string.match(first, '^[^.]*')) then
  leave(first)
  first = redis.call('ZRANGE', line, 0, 0)[1]
end
if first then redis.call('HSET', KEYS[1], 'line', 1) else redis.call('HDEL', KEYS[1], 'line') end
--@end
--@if begun
-- Notes that the body begins, until its end is seen: its message is delivered again if its process dies.
--   begun: sorted set of task id -> until when (ms) that counts   begun_ttl: for how long (ms)
redis.call('ZREMRANGEBYSCORE', begun, '-inf', string.format('%.0f', now))
redis.call('ZADD', begun, string.format('%.0f', now + begun_ttl), ARGV[3])
redis.call('PEXPIRE', begun, begun_ttl)
--@end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[6] == '1' then redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[2]) end
--@if limit
-- Notes the slot that was chosen as held, and how many may be, and answers {'granted', fence, slot}.
redis.call('HSET', KEYS[1], 'limit', slot_limit)
if slot > 0 then
  redis.call('SADD', slots, slot)
  redis.call('PEXPIRE', slots, math.max(ARGV[2], redis.call('PTTL', slots)))
end
do return {'granted', fence, slot} end
--@end
return {'granted', fence}
