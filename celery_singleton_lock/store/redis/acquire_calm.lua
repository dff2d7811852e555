-- The quiet time is over: a newcomer that joins from now on begins another (see acquire_quiet.lua).
redis.call('HDEL', waiting, 'quiet_until', 'quiet_latest')
