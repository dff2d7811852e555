-- Adds a run to the history, which is shortened now and then.
if history_length ~= '0' then
  local length = redis.call('LPUSH', history, ended .. '\31' .. outcome .. '\31' .. problem .. '\31' .. fate .. '\31' .. entry)
  if length > history_length * 1.1 then redis.call('LTRIM', history, 0, history_length - 1) end
end
