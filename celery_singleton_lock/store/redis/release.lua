--!df flags=allow-undeclared-keys
-- Deletes a lock if this token owns it. If messages wait in line, names the next one, for which the lock is reserved.
-- KEYS  1 lock, or the attempt key again where only the token is known   2 attempt   3 completed (see acquire.lua)
-- ARGV  1 token   2 how long (ms) a waiting redelivery waits for the outcome, and the lock stays reserved   3 '1' after a success
-- Not in KEYS: the line, `waiting` and the other slots of the lock. Their names follow from its own, which may be known here alone.
-- Returns {1 if a redelivery waits for the outcome, else 0; the message of the next in line, or ''}
-- The feature `queued` goes with `limit`.
--@feature starts  KEYS starts | ARGV ended
--@feature begun  KEYS begun | ARGV task_id
--@feature continued  KEYS continued | ARGV continued_ttl
--@feature queued  KEYS first
--@feature records  KEYS registry, stats, history | ARGV outcome, problem, history_length, loss, fence, where
--@feature kept  ARGV kept_token, kept_state, kept_ttl
--@feature limit  KEYS slots
--@if starts
-- ended: which of them count no more: 'own' or 'all'
if ended == 'all' then redis.call('DEL', starts) else redis.call('ZREM', starts, ARGV[1]) end
--@end
--@if begun
redis.call('ZREM', begun, task_id)
--@end
--@if continued
-- Another task goes on with this task's id (`Task.replace`): duplicates that follow the id go on following it, for a time (ms) at least.
redis.call('SET', continued, '1', 'PX', continued_ttl)
--@end
local lock, finishing = KEYS[1], 'finishing:' .. ARGV[1]
if lock == KEYS[2] then lock = redis.call('GET', KEYS[2]) end
--@if queued
-- Finds the slot of a reservation, which has no attempt key.
lock = redis.call('HGET', first, 'token') == ARGV[1] and first
for _, number in ipairs(redis.call('SMEMBERS', slots)) do
  if redis.call('HGET', first .. ':' .. number, 'token') == ARGV[1] then lock = first .. ':' .. number end
end
--@end
local holder = lock and redis.call('HMGET', lock, 'token', 'redelivered', 'line', 'task', 'node', 'pid', 'since', 'fence', 'state') or {}
if holder[1] ~= ARGV[1] then -- another's, or released before: the redelivery waits for another TTL
  --@if records
  -- Notes the end of a body that does not own its lock any more. In the history, it takes the place of what became of its lease.
  --   fence: of the lease, '' if there was no body   where: pid, node, digest and slot, and task id, for a lease that nothing tells of
  if fence ~= '' and outcome ~= 'started' then
    local time = redis.call('TIME')
    local now, mark, entry = time[1] * 1000 + math.floor(time[2] / 1000), '\31' .. fence .. '\31'
    for _, one in ipairs(redis.call('ZRANGEBYSCORE', registry, '-inf', now, 'LIMIT', 0, 100)) do
      if string.find(one, mark, 1, true) then entry = one end
    end
    if entry then
      redis.call('ZREM', registry, entry)
      redis.call('HINCRBY', stats, 'expired', '1')
    end
    local is_new, fate = true, loss ~= '' and loss or 'expired'
    for _, run in ipairs(redis.call('LRANGE', history, 0, -1)) do
      if string.find(run, mark, 1, true) then
        local how, former, rest = string.match(run, '^[^\31]*\31([^\31]*)\31[^\31]*\31([^\31]*)\31(.*)$')
        if how == 'expired' or how == 'released_by_operator' then
          redis.call('LREM', history, 1, run)
          entry, fate = rest, former == 'released_by_operator' and former or fate
        else
          is_new = false -- this call was sent before
        end
      end
    end
    if is_new then
      entry = entry or ('running' .. mark .. string.format('%.0f', math.floor(fence / 1000)) .. '\31' .. where)
      local ended = string.format('%.0f', now)
      if outcome == 'success' then redis.call('HSET', stats, 'last_success', ended) end
      --@include logged
    end
  end
  --@end
  return {redis.call('GET', KEYS[3]) == finishing and redis.call('PEXPIRE', KEYS[3], ARGV[2]) or 0, ''}
end
local message, lasts = '', ARGV[2]
--@if records
-- Notes the end of a lease. `problem`: the beginning of the body's error   loss: why the lease was lost, or ''
--@include entry
--@include observe
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entry = entry_of(lock, registry, unpack(holder, 4, 9))
if redis.call('ZREM', registry, entry) == 1 then
  if holder[9] or outcome == 'started' then -- no body has run, or it still runs
    redis.call('HINCRBY', stats, 'released:' .. outcome, '1')
  else
    observe('released:' .. outcome, 'hold_ms', now - holder[7])
    local ended, fate = string.format('%.0f', now), loss ~= '' and loss or 'released'
    if outcome == 'success' then redis.call('HSET', stats, 'last_success', ended) end
    --@include logged
  end
end
--@end
--@if kept
-- The lock becomes another owner's, or nobody's, for a time (ms).
redis.call('HSET', lock, 'token', kept_token, 'state', kept_state)
redis.call('HDEL', lock, 'redelivered')
redis.call('PEXPIRE', lock, kept_ttl)
--@if records
-- The lock is listed as what it becomes. A reservation is a lease, a cooldown is none.
redis.call('ZADD', registry, now + kept_ttl, entry_of(lock, registry, holder[4], holder[5], holder[6], holder[7], holder[8], kept_state))
if kept_state == 'queued' then redis.call('HINCRBY', stats, 'acquired', '1') end
--@end
--@if limit
-- The slot is remembered as long as the lock is kept.
redis.call('PEXPIRE', slots, math.max(kept_ttl, redis.call('PTTL', slots)))
--@end
lock, holder[3] = KEYS[2], false -- the attempt key is deleted instead
--@end
--@if limit and not kept
-- One of several slots: it becomes free. What may follow is found after that.
local limit = redis.call('HGET', lock, 'limit') or 0
holder[3] = false
--@end
if holder[3] then
  redis.call('HDEL', lock, 'redelivered')
  --@if not limit
  --@include next
  --@end
  lock = KEYS[2] -- the attempt key is deleted instead
end
redis.call('DEL', lock, KEYS[2])
--@if limit and not kept
--@include next_slot
--@end
if not holder[2] or ARGV[3] ~= '1' then return {0, message} end
redis.call('SET', KEYS[3], finishing, 'PX', ARGV[2])
return {1, message}
