-- A copy in its turn acquires no slot: its message keeps the place in line until it starts.
if is_turn and not owner and ARGV[1] == 'queued:line' then return {'granted', '0', 0} end
