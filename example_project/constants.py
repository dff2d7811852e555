"""Durations in seconds and names of environment variables; the settings and the demo share them."""

REDIS_URL_VARIABLE = "EXAMPLE_REDIS_URL"
PREFIX_VARIABLE = "EXAMPLE_KEY_PREFIX"
LEDGER_VARIABLE = "EXAMPLE_LEDGER"

#: How long a lock outlives a killed worker.
LOCK_TTL = 3.0
#: How often beat sends an import. An import takes five seconds.
IMPORT_EVERY = 2.0
#: When the broker redelivers a message that no worker has acknowledged. This is longer than the longest body and its wait
#: in a worker, so only messages of a dead worker are redelivered.
VISIBILITY_TIMEOUT = 10
