-- KEYS begun | ARGV task_id
redis.call('ZREM', begun, task_id) -- see acquire_begun.lua
