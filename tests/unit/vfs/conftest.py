"""A bucket with as many clients as a test asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted import Client, World
from tests.mounted import world as opened


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a module that says BOTH_LISTINGS also run where listings show metadata, as MinIO's do (S-129)."""
    if "world" in metafunc.fixturenames and getattr(metafunc.module, "BOTH_LISTINGS", False):
        metafunc.parametrize("world", [False, True], indirect=True, ids=["plain-listing", "metadata-listing"])


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with opened(tmp_path, listed_metadata=getattr(request, "param", False)) as made:
        yield made


@pytest.fixture
def one(world: World) -> Client:
    return world.client()


@pytest.fixture
def other(world: World) -> Client:
    return world.client()
