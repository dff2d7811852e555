"""A small service that keeps exchange rates and account balances in step, with every task locked."""

from example_project.app import app

__all__ = ["app"]
