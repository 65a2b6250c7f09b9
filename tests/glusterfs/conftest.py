"""Everything here shares one GlusterFS server, in whose network the tests are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.glusterfs.server import GlusterServer, obstacle
from tests.servers import ServerMissing


@pytest.fixture(scope="session")
def gluster(clean_environment: Path) -> Iterator[GlusterServer]:
    """The server, with the volume `digits`, which has a directory `sub`."""
    if reason := obstacle():
        raise ServerMissing(reason)
    server = GlusterServer(Path(tempfile.mkdtemp(prefix="gl-", dir="/var/tmp")) / "server")
    try:
        server.up()
        server.volume("digits")
        with server.network.entered():
            yield server
    finally:
        server.down()
        server.directory.parent.rmdir()
