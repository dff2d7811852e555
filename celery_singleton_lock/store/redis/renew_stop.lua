-- ARGV stoppable
-- Answers 'stop' for a lease whose holder is asked to stop (see acquire_stop.lua). `stoppable` has '1' for each lease that looks, else '0'.
if string.sub(stoppable, i, i) == '1' and redis.call('HGET', lock, 'stop') == token then results[i] = 'stop' end
