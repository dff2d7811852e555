-- One of several slots: it becomes free. What may follow is found after that (see any_next_slot.lua).
local limit = redis.call('HGET', lock, 'limit') or 0
holder[3] = false
