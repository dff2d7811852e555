"""Where leases live: the protocol of stores, and the stores."""
