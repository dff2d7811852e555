-- KEYS slots | ARGV slot_limit
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
