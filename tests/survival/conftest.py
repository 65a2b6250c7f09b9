"""The mount that the load works on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mount.conftest import Mounter, mount_with
from tests.mount.mounts import Mount

__all__ = ["mount_with"]


@pytest.fixture
def mount(mount_with: Mounter) -> Iterator[Mount]:
    with mount_with() as made:
        yield made
