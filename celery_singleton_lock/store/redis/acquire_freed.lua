-- A reservation has ended without a start.
if holder[8] and redis.call('ZREM', registry, holder[8]) == 1 then redis.call('HINCRBY', stats, 'released:other', 1) end
