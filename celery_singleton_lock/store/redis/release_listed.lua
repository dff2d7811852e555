-- The lock is listed as what it becomes. A reservation is a lease, a cooldown is none.
redis.call('ZADD', registry, now + kept_ttl, entry_of(lock, registry, holder[4], holder[5], holder[6], holder[7], holder[8], kept_state))
if kept_state == 'queued' then redis.call('HINCRBY', stats, 'acquired', '1') end
