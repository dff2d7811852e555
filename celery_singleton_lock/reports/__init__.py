"""What a process reports of its leases and its store: log lines, signals, events and counts."""
