  -- With several holders, starts that still run are no crashes. A lease of a slot has an attempt key as long as it lives.
  if too_many then
    local crashed, prefix = 0, string.sub(KEYS[2], 1, -1 - #ARGV[1])
    for _, token in ipairs(redis.call('ZRANGE', starts, 0, -1)) do
      if redis.call('EXISTS', prefix .. token) == 0 then crashed = crashed + 1 end
    end
    too_many = crashed >= start_limit + 0
  end
