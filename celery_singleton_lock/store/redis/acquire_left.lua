-- Answers also how long (ms) the quiet time lasts.
place[4] = quiet_left
