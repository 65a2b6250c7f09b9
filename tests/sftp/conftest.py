"""Everything here shares one SSH server, but for tests that break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sftp.sshd import SSHServer, running


@pytest.fixture(scope="session")
def sshd(clean_environment: Path) -> Iterator[SSHServer]:
    """The server."""
    with running(clean_environment) as server:
        yield server
