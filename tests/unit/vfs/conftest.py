"""A bucket with as many clients as a test asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted import Client, World
from tests.mounted import world as opened


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def one(world: World) -> Client:
    return world.client()


@pytest.fixture
def other(world: World) -> Client:
    return world.client()
