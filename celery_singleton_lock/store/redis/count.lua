-- Adds what a process has counted.
-- KEYS  1 stats (see acquire.lua)
-- ARGV  1 <field>=<number>, separated by spaces
for name, number in string.gmatch(ARGV[1], '([^ ]+)=(%d+)') do redis.call('HINCRBY', KEYS[1], name, number) end
return 0
