-- The lock is a reservation: no worker has started the message.
redis.call('HSET', KEYS[1], 'state', 'queued')
