"""Durations in seconds, and names of environment variables, that the settings and the demo share."""

REDIS_URL_VARIABLE = "EXAMPLE_REDIS_URL"
PREFIX_VARIABLE = "EXAMPLE_KEY_PREFIX"
LEDGER_VARIABLE = "EXAMPLE_LEDGER"

#: How long a lock outlives a worker that vanished.
LOCK_TTL = 3.0
#: How often beat asks for an import; one takes five seconds.
IMPORT_EVERY = 2.0
#: After this a message that was delivered and not acknowledged is delivered again: longer than the longest body
#: plus its wait in a worker, so that only the messages of a dead worker come back.
VISIBILITY_TIMEOUT = 10
