-- Until then a free lock is nobody's (see acquire_quiet.lua).
is_turn = is_turn and quiet_left == 0
