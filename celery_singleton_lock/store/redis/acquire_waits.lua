-- A message of the line has waited since it joined.
if ticket ~= '' then
  local joined = redis.call('ZSCORE', line, ticket)
  if joined then waited = now - joined / 1000 end
end
