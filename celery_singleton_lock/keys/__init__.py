"""Which calls are the same work: canonical forms and lock keys."""
