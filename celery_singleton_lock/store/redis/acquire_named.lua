-- A copy in its turn acquires no slot: its message, which it publishes, keeps the place in line until it starts.
if is_turn and not owner and ARGV[1] == 'queued:line' then
  if redis.call('ZSCORE', line, ticket) then
    redis.call('HSET', waiting, ticket .. ':due', now + ARGV[2], ticket .. ':message', '')
  end
  return {'granted', '0', 0}
end
