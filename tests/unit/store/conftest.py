"""The two ways to wait for a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from datastore.fuse.loop import now
from tests.driving import resolve
from tests.unit.store.scripted import Transports, Wait


@pytest.fixture(params=[now, resolve], ids=["blocking", "loop"])
def wait(request: pytest.FixtureRequest) -> Wait:
    """By a thread that blocks, and on a loop."""
    return cast("Wait", request.param)


@pytest.fixture
def transports(wait: Wait) -> Iterator[Transports]:
    """Those of one test."""
    made = Transports(wait)
    yield made
    made.close()
