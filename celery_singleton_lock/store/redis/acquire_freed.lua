-- A reservation has ended without a start.
if holder[2] and redis.call('ZREM', registry, entry_of(KEYS[1], registry, unpack(holder, 2, 7))) == 1 then
  redis.call('HINCRBY', stats, 'released:other', '1')
end
