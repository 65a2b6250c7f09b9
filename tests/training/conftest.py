"""A laptop for each test; no job outlives it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore.training.local.driver import LocalDriver
from tests.servers import Server, make_bucket
from tests.training.laptop import Laptop, left_behind, put_digits


@pytest.fixture(scope="session")
def digits(versitygw: Server) -> str:
    """A bucket with digits.npz."""
    bucket = make_bucket(versitygw, f"digits-{uuid.uuid4().hex[:12]}")
    put_digits(versitygw, bucket)
    return bucket


@pytest.fixture
def laptop(versitygw: Server, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    """The directory is the job's working directory, and the interpreter of the tests comes first on PATH."""
    out = make_bucket(versitygw, f"out-{uuid.uuid4().hex[:12]}")
    programs = str(Path(sys.executable).parent)
    made = Laptop(versitygw, digits, out, tmp_path, {"PATH": f"{programs}:{os.environ['PATH']}"})
    yield made
    driver = LocalDriver()
    for each in driver.observe_all():
        driver.delete(each.job.name, each.job.namespace)
    assert left_behind() == []
