    redis.call('HINCRBY', stats, 'starts_refused', '1')
