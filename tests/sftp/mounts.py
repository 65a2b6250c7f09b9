"""Mounts of a directory of the SSH server, made by the real command."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from datastore.api.mountspec import MountSpec
from datastore.api.source import SFTPLocation, SSHCredentials
from datastore.fuse.sftp.connection import Connection
from datastore.fuse.sftp.filesystem import SFTPFilesystem
from datastore.secret import Secret
from tests.driving import resolve, the_loop
from tests.mount.mounts import CommandMount
from tests.sftp.sshd import SSHServer
from tests.tools.mounting import NAME

TTL_S = 0.3
"""metadataTTL of mounts whose tests change things behind their back."""
SECRET = "login"


def documents(sftp: dict[str, Any], user: str, private_key: str, **spec: Any) -> str:
    """A Datastore and its Secret."""
    kind = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": NAME}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}}
    keys = {"username": user, "ssh-privatekey": private_key}
    return yaml.safe_dump_all([{**kind, "spec": {"sftp": sftp, **spec}}, {**secret, "stringData": keys}])


@dataclass
class DirectoryMount(CommandMount):
    """A mount of `directory`. sftp: other fields of spec.sftp; None leaves one out."""

    server: SSHServer
    directory: Path
    sftp: dict[str, Any] = field(default_factory=dict)

    def manifest(self) -> str:
        """Return the manifest of the Datastore, with its Secret."""
        sftp = {
            "host": "127.0.0.1",
            "port": self.server.port,
            "path": str(self.directory),
            "knownHosts": self.server.known_hosts,
            "credentialsSecret": SECRET,
            **self.sftp,
        }
        given = {name: each for name, each in sftp.items() if each is not None}
        return documents(given, self.server.user, self.server.private_key, **self.spec)


@contextlib.contextmanager
def unmounted(
    server: SSHServer, directory: Path, state: Path, *, listing_bytes: int = 1 << 20, resumed: bool = False
) -> Iterator[SFTPFilesystem]:
    """The file system of a mount of `directory`, without a kernel. resumed: after the death of one with this state."""
    credentials = SSHCredentials(username=server.user, private_key=Secret(server.private_key))
    location = SFTPLocation(
        host="127.0.0.1",
        port=server.port,
        path=str(directory),
        known_hosts=server.known_hosts,
        credentials=credentials,
    )
    connection = Connection(location)
    connection.start(wait=True)
    spec = MountSpec(name="n", mountpoint="/m", source=location, state_dir=str(state), cache_dir="/nothing")
    made = SFTPFilesystem(connection, spec, loop=the_loop(), limit=10_000, listing_bytes=listing_bytes, resumed=resumed)
    try:
        yield made
    finally:
        resolve(made.stop())


@contextlib.contextmanager
def mounted(
    server: SSHServer,
    directory: Path,
    home: Path,
    *,
    transport: str = "kernel",
    options: tuple[str, ...] = (),
    **spec: Any,
) -> Iterator[DirectoryMount]:
    """A mount of a machine of its own, ended at the end. home: a directory with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="s", dir=home))
    made = DirectoryMount(server, directory, folder=folder, transport=transport, spec=spec, options=options)
    try:
        made.mount()
        yield made
    finally:
        made.end()
