-- Answers also for how long (ms) the holder is asked to stop.
place[4], place[5] = place[4] or 0, asked or 0
