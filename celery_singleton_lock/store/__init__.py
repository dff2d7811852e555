"""Where locks live: the protocol of stores, and the stores."""
