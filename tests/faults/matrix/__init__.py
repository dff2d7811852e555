"""The fault matrix: one module for each kind of fault."""

#: Seconds of a wait that is no part of a promise: only a hang meets it. `measured` checks what the page of guarantees promises.
LATE = 60.0
