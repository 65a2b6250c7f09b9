"""The two guests and their network as one thing, which is up or down."""

from __future__ import annotations

import os
import shutil
import uuid
from functools import cached_property
from pathlib import Path

from tests.nfs.host import packages
from tests.nfs.host.guest import Guest
from tests.nfs.host.network import CLIENT, SERVER, Network
from tests.nfs.host.server import NFSServer
from tests.servers import ServerMissing

NEEDED = {
    "cc": "build-essential",
    "ip": "iproute2",
    "mke2fs": "e2fsprogs",
    "nsenter": "util-linux",
    "ssh": "openssh-client",
}


def obstacle() -> str:
    """Why the guests can't run here, or ''."""
    if os.geteuid():
        return "the NFS host needs root, for its network"
    if not Path("/dev/net/tun").exists():
        return "the NFS host needs /dev/net/tun"
    return packages.absent(NEEDED)


class Bed:
    """In `directory`, which is its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def network(self) -> Network:
        """The namespace; its name is kept in the directory."""
        return Network((self.directory / "network").read_text())

    @cached_property
    def server(self) -> NFSServer:
        """The NFS host."""
        return NFSServer("server", SERVER, self.network, self.directory / "server", packages.unpacked())

    @cached_property
    def client(self) -> Guest:
        """The NFS client."""
        return Guest("client", CLIENT, self.network, self.directory / "client", packages.unpacked())

    def up(self, *, client: bool = True) -> None:
        """Start everything and wait until it serves. Errors: ServerMissing, AssertionError; then nothing stays."""
        if reason := obstacle():
            raise ServerMissing(reason)
        packages.unpacked()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.directory / "network").write_text(f"nfs-{uuid.uuid4().hex[:8]}")
        guests = [self.server, self.client] if client else [self.server]
        try:
            self.network.create()
            for guest in guests:
                guest.prepare()
                guest.start()
            for guest in guests:
                guest.ready()
        except BaseException:
            self.down()
            raise

    def add_client(self) -> Guest:
        """The second guest, started when it is first asked for."""
        if not self.client.directory.exists():
            self.client.prepare()
            self.client.start()
            self.client.ready()
        return self.client

    def down(self) -> None:
        """End everything at once and remove it. Idempotent."""
        if not (self.directory / "network").exists():
            return
        for guest in (self.server, self.client):
            guest.cut_power()
        self.network.remove()
        shutil.rmtree(self.directory, ignore_errors=True)
