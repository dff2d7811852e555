-- KEYS starts
redis.call('DEL', starts) -- see acquire_starts.lua
