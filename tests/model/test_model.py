"""Random histories of two mounts and another client against the reference model.

The quick profile is part of `make test`; MODEL_PROFILE=long runs for hours. A failure prints the history, and a blob
that repeats it (@reproduce_failure).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.model.machine import FilesystemMachine

LONG = os.environ.get("MODEL_PROFILE") == "long"

pytestmark = pytest.mark.timeout(7200 if LONG else 900)  # shrinking a failure takes minutes
TestFilesystem = FilesystemMachine.TestCase
TestFilesystem.settings = settings(
    max_examples=5000 if LONG else 120,
    stateful_step_count=100 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
