"""Lists on the broker's server through which a benchmark and its worker talk: no part of what is measured."""

from __future__ import annotations

#: One entry for each gate that a worker has reached.
REACHED = "benchmarks:reached"
#: The word that opens the gates.
OPEN = "benchmarks:open"
#: What a batch took.
DONE = "benchmarks:done"
