-- KEYS starts | ARGV ended
-- starts: see acquire_starts.lua   ended: which of them count no more: 'own' or 'all'
if ended == 'all' then redis.call('DEL', starts) else redis.call('ZREM', starts, ARGV[1]) end
