"""What operators use, with the workers of the integration tests: command line, exporter, Django, Flower, and the example project."""

from tests.integration.conftest import *  # noqa: F403 - fixtures
