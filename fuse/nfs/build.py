"""The mount of an NFS export: the builder that the supervisor's servers use for sources of kind nfs."""

from __future__ import annotations

from pathlib import Path

from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation
from datastore.errors import InvalidManifest

from ..fileserver import nodes_within
from ..loop import Loop
from .client import FIRST_CONNECTION_S, Client
from .filesystem import NFSFilesystem


def build_mount(spec: MountSpec, *, resumed: bool = False) -> NFSFilesystem:
    """Connect, then make the file system. resumed: the kernel already knows nodes from the mount's earlier process.

    Errors: the reason why the export can't be mounted, within 15 s. A resumed mount waits for its NFS server instead.
    """
    location = spec.source
    if not isinstance(location, NFSLocation):
        raise InvalidManifest(f"{location} is no NFS export")
    if location.version not in ("", "3"):
        raise InvalidManifest(
            f"{location}: without NFS in the kernel, or without root, exports are mounted with version 3, and"
            f" {location.version} is asked for"
        )
    client = Client(location)
    if not resumed:
        client.start(FIRST_CONNECTION_S)
    Path(spec.state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    filesystem = NFSFilesystem(client, spec, loop=Loop(), limit=nodes_within(spec.memory_bytes), resumed=resumed)
    if resumed:
        client.start()
    return filesystem
