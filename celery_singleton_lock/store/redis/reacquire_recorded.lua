-- KEYS registry, stats
-- Notes the lease as a new one (see acquire_recorded.lua).
local state = 'running'
--@listed
redis.call('HINCRBY', stats, 'reacquired', 1)
