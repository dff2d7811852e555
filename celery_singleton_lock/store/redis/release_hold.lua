-- ARGV hold
-- The lock stays for so long (ms), without an owner.
redis.call('HSET', lock, 'token', '', 'state', 'held')
redis.call('PEXPIRE', lock, hold)
lock = KEYS[2]
