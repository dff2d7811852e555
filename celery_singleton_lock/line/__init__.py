"""Messages that wait in line for a lock: how they join it, wait in it, and are started."""
