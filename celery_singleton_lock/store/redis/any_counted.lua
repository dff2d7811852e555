-- ARGV counted
-- Adds what the process has counted: <field>=<number>, separated by spaces.
for name, number in string.gmatch(counted, '([^ ]+)=(%d+)') do redis.call('HINCRBY', stats, name, number) end
