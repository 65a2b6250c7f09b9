"""The mount of an SFTP directory: the builder that the supervisor's servers use for sources of kind sftp."""

from __future__ import annotations

from pathlib import Path

from datastore.api.mountspec import MountSpec
from datastore.api.source import SFTPLocation
from datastore.errors import InvalidManifest

from ..fileserver import nodes_within
from ..loop import Loop
from .connection import Connection
from .filesystem import SFTPFilesystem
from .probe import look


def build_mount(spec: MountSpec, *, resumed: bool = False) -> SFTPFilesystem:
    """Connect, then make the file system. resumed: the kernel already knows nodes from the mount's earlier process.

    Errors: the reason why the directory can't be mounted. A resumed mount waits for its SSH server instead.
    """
    location = spec.source
    if not isinstance(location, SFTPLocation):
        raise InvalidManifest(f"{location} is no directory of an SSH server")
    connection = Connection(location)
    connection.start(wait=not resumed)
    if not resumed:
        look(connection)
    Path(spec.state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    room = spec.memory_bytes // 4
    limit = nodes_within(spec.memory_bytes - room)
    return SFTPFilesystem(connection, spec, loop=Loop(), limit=limit, listing_bytes=room, resumed=resumed)
