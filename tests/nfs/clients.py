"""A client and a file system of this process, for tests without a mount."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation
from datastore.fuse.nfs.client import OUTAGE_S, Client
from datastore.fuse.nfs.filesystem import NFSFilesystem
from datastore.fuse.ops import Caller
from tests.driving import resolve, the_loop
from tests.localfs import LocalFs
from tests.mounted import Kernel

CONNECT_S = 30.0
ROOT = Caller(0, 0, os.getpid())


@contextlib.contextmanager
def connected(location: NFSLocation, outage_s: float = OUTAGE_S) -> Iterator[Client]:
    """A client, ended at the end."""
    client = Client(location, outage_s=outage_s)
    client.start(CONNECT_S)
    try:
        yield client
    finally:
        client.stop()


class Here:
    """A file system over a client of its own. resumed: in the place of one that died, whose state it has."""

    def __init__(self, location: NFSLocation, state: Path, *, resumed: bool = False, limit: int = 100_000) -> None:
        state.mkdir(exist_ok=True)
        self.client = Client(location)
        if not resumed:
            self.client.start(CONNECT_S)
        self.kernel = Kernel()
        self.spec = MountSpec(name="n", mountpoint="/m", source=location, state_dir=str(state), cache_dir="/nothing")
        self.fs = NFSFilesystem(self.client, self.spec, loop=the_loop(), limit=limit, resumed=resumed)
        if resumed:
            self.client.start()
        the_loop().call(lambda: self.fs.start(self.kernel))
        self.local = LocalFs(self.fs, ROOT)

    def die(self) -> None:
        """As kill -9 leaves it: the server is told nothing."""
        self.client.stop()


@contextlib.contextmanager
def served(location: NFSLocation, state: Path, limit: int = 100_000) -> Iterator[Here]:
    """A file system, stopped in order at the end."""
    here = Here(location, state, limit=limit)
    try:
        yield here
    finally:
        resolve(here.fs.stop())
