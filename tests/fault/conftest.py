"""The directory in which the sweeps keep their state directories."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory if the system has one: a case makes several databases, and each syncs when it is closed."""
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="ds-fault-", dir=_MEMORY if usable else None) as directory:
        yield Path(directory)
