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
