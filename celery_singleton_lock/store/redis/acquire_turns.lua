-- A line before several slots: the turn has come for as many of the first in line as slots are free. No slot is reserved for them, as a
-- newcomer's rank is behind all that wait.
if not owner then
  local free, rank, one = slot_limit - live, 0, head
  while one and one ~= ticket and rank < free do
    if (redis.call('HGET', waiting, one .. ':due') or 0) + 0 < now then leave(one) else rank = rank + 1 end
    one = redis.call('ZRANGE', line, rank, rank)[1]
  end
  is_turn = rank < free
end
