-- Answers also for how long (ms) the holder is asked to stop.
place[5] = asked or 0
