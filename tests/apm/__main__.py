"""Runs the tests of this directory beside the integration that is installed: ``python -m tests.apm [pytest's options]``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.apm.integrations import installed

installed().start(lambda kind: None)  # before pytest's plugins import Celery

import pytest  # noqa: E402

sys.exit(pytest.main([str(Path(__file__).parent), *sys.argv[1:]]))
