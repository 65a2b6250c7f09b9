"""The NFS host for tests: one of each guest for a whole session, in whose network the tests then are."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nfs.host.bed import Bed
from tests.nfs.host.guest import Guest
from tests.nfs.host.server import FOR_ALL, NFSServer
from tests.servers import ServerMissing

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def nfs_bed(nothing_stays_behind: None) -> Iterator[Bed]:
    """The guests' network, with the NFS host up. This process, and all that it starts, is in that network."""
    directory = Path(tempfile.mkdtemp(prefix="nfs-"))
    bed = Bed(directory)
    try:
        bed.up(client=False)
    except ServerMissing as error:
        shutil.rmtree(directory)
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    try:
        with bed.network.entered():
            yield bed
    finally:
        bed.down()


@pytest.fixture(scope="session")
def nfs_host(nfs_bed: Bed) -> NFSServer:
    """The NFS host. A test that ends it has it up again when it is done."""
    return nfs_bed.server


@pytest.fixture(scope="session")
def nfs_client(nfs_bed: Bed) -> Guest:
    """The guest whose kernel is an NFS client."""
    return nfs_bed.add_client()


@pytest.fixture
def export(nfs_host: NFSServer) -> Iterator[Callable[..., str]]:
    """Make an export for this test alone: export(quota_bytes=..., clients=..., options=...) gives its path."""
    made: list[str] = []

    def make(*, clients: str = "*", options: str = FOR_ALL, quota_bytes: int = 0) -> str:
        made.append(f"t{os.getpid()}-{next(_numbers)}")
        return nfs_host.export(made[-1], clients=clients, options=options, quota_bytes=quota_bytes)

    yield make
    for name in made:
        nfs_host.unexport(name)
