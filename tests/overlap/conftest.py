"""The line and each policy, pairs of options, and the recipes, with the workers of the integration tests."""

from tests.integration.conftest import *  # noqa: F403 - fixtures
