-- KEYS continued | ARGV continued_ttl
-- Another task goes on with this task's id (`Task.replace`): duplicates that follow the id go on following it, for a time (ms) at least.
redis.call('SET', continued, '1', 'PX', continued_ttl)
