"""A bucket with as many clients as a test asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore.fuse.data import cachespace
from tests.mounted import Client, World
from tests.mounted import world as opened
from tests.patience import PATIENCE_S


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a module that says BOTH_LISTINGS also run where listings show metadata, as MinIO's do (S-129)."""
    if "world" in metafunc.fixturenames and getattr(metafunc.module, "BOTH_LISTINGS", False):
        metafunc.parametrize("world", [False, True], indirect=True, ids=["plain-listing", "metadata-listing"])


@pytest.fixture(autouse=True)
def patient_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is kept on the disk, also on a busy machine."""
    monkeypatch.setattr(cachespace, "LOCK_WAIT_S", PATIENCE_S)


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
