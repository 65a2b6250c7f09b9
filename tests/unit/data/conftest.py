"""The store of the reader's tests, and caches of one directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.data.probe import Caches, Probe


@pytest.fixture
def store() -> Iterator[Probe]:
    """Whoever waits at its gate ends with the test."""
    made = Probe()
    yield made
    made.gate.set()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Caches]:
    made = Caches(tmp_path / "cache")
    yield made
    for cache in made.made:
        cache.close()
