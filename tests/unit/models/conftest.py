"""Stores of models that need no server: a directory, and the in-memory bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modelstores import Home, directory_home, memory_home, plant


@pytest.fixture(params=["directory", "memory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    if request.param == "directory":
        with directory_home(tmp_path / "home") as made:
            (tmp_path / "home").mkdir()
            yield made
    else:
        with memory_home() as made:
            yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with everything that models have."""
    return plant(tmp_path / "source")


@pytest.fixture
def bucket() -> Iterator[Home]:
    """Yield a bucket, for behaviour that directories don't have."""
    with memory_home() as made:
        yield made
