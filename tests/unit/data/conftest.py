"""The store of the reader's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.data.probe import Probe


@pytest.fixture
def store() -> Iterator[Probe]:
    """Whoever waits at its gate ends with the test."""
    made = Probe()
    yield made
    made.gate.set()
