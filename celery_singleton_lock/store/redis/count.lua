-- Adds what a process has counted (see any_counted.lua).
-- KEYS  1 stats (see acquire_recorded.lua)
local stats = KEYS[1]
--@counted
return 0
