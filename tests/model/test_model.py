"""Random histories of two mounts and another client against the reference model.

The quick profile is part of `make test`; DATASTORE_MODEL=long runs for minutes, with histories of 100 steps.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.model.machine import FilesystemMachine

LONG = os.environ.get("MODEL_PROFILE") == "long"

TestFilesystem = FilesystemMachine.TestCase
TestFilesystem.settings = settings(
    max_examples=3000 if LONG else 150,
    stateful_step_count=100 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
