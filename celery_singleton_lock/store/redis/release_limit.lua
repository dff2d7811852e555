-- A line before several slots: the slot becomes free, and `wake_slots.lua` tells whose turn it is.
do
  local base, digest = string.match(lock, '^(.*):lock:([^:]+)')
  line_waits, holder[3] = redis.call('ZCARD', base .. ':line:' .. digest) > 0 and 2 or 0, false
end
