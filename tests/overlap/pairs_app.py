"""The app of the worker that runs a task for each pair of options."""

from tests.integration.tasks import perform
from tests.integration.worker_app import app
from tests.pairs import add_pairs

__all__ = ["app"]

add_pairs(app, perform)
