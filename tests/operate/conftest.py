"""What operators use, with the workers of the integration tests: the command line, the exporter, Django, Flower, the example.

Also what a worker says of its settings and its store.
"""

from tests.integration.conftest import *  # noqa: F403 - fixtures
