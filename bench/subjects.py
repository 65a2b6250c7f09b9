"""The subjects that are measured: our mounts, the plain client, the local disk, and the peers; each is opened cold."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.bars import LOCAL, NATIVE, OURS, READ_ONLY, WRITE_BACK
from bench.bucket import BUCKET
from bench.peers import Peer, Place
from bench.processes import child, drop_caches, fresh, is_mounted, unmount, wait_for
from tests.servers import Server
from tests.tools.mounting import NAME, Client, manifest

MOUNT_TIMEOUT_S = 20.0
END_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A directory to work in. seconds: how long mounting took. pid: returns the id of its server process, or None."""

    root: Path
    seconds: float = 0.0
    pid: Callable[[], int | None] = lambda: None


class Subject(Protocol):
    """plain: it shows the prepared objects. remote: what it writes can be found in S3. native: it is the plain client,
    not a directory. late: it is known to answer changes before S3 has them."""

    @property
    def name(self) -> str: ...
    @property
    def plain(self) -> bool: ...
    @property
    def writable(self) -> bool: ...
    @property
    def remote(self) -> bool: ...
    @property
    def native(self) -> bool: ...
    @property
    def late(self) -> bool: ...

    def opened(self) -> contextlib.AbstractContextManager[Opened]:
        """Open it cold, with nothing cached anywhere. Errors: NotReady, RuntimeError, OSError."""
        ...


@dataclass(slots=True)
class Ours:
    """A mount by the `datastore` command. folder: needs a short path, because a Unix socket is created in it."""

    name: str
    server: Server
    folder: Path
    spec: Mapping[str, Any] = field(default_factory=dict)
    bucket: str = BUCKET
    plain: bool = True
    remote: bool = True
    native: bool = False
    late: bool = False

    @property
    def writable(self) -> bool:
        """Whether the mount is without readOnly."""
        return not self.spec.get("readOnly", False)

    @property
    def client(self) -> Client:
        """The client machine on which it is mounted."""
        return Client(self.folder)

    @property
    def target(self) -> Path:
        return self.folder / "mnt"

    def server_pid(self) -> int | None:
        """The current process id of the mount server, from `datastore status`."""
        pid = json.loads(self.client.run("status", self.target, "-o", "json").stdout).get("serverPid")
        return pid if isinstance(pid, int) else None

    def mount(self) -> None:
        """Mount, and use what the cache has."""
        self.client.run("mount", self.folder / "datastore.yaml", NAME, self.target)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Mount it on a machine without a cache; unmount it, with --force after an error."""
        fresh(self.folder)
        (self.folder / "run").mkdir(mode=0o700)
        (self.folder / "datastore.yaml").write_text(manifest(self.server, self.bucket, **self.spec))
        drop_caches()
        force = ["--force"]
        try:
            began = time.monotonic()
            self.mount()
            yield Opened(self.target, time.monotonic() - began, self.server_pid)
            force = []
        finally:
            if is_mounted(self.target):
                try:
                    self.client.run("umount", *force, self.target)
                except RuntimeError:
                    self.client.run("umount", "--force", self.target)
                    raise


@dataclass(slots=True)
class Directory:
    """A directory on the same disk as the caches; the plain client has one for its downloads."""

    name: str
    root: Path
    native: bool = False
    plain: bool = True
    writable: bool = True
    remote: bool = False
    late: bool = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Open it with the page cache dropped."""
        drop_caches()
        yield Opened(self.root)


@dataclass(slots=True)
class PeerMount:
    """A mount by another program."""

    peer: Peer
    server: Server
    folder: Path
    writable: bool = True
    native: bool = False

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def plain(self) -> bool:
        """Whether the peer shows objects as they are."""
        return self.peer.plain

    @property
    def late(self) -> bool:
        """Whether the peer is known to answer changes before S3 has them."""
        return self.peer.late

    @property
    def remote(self) -> bool:
        """Whether its files can be found in S3: only if it keeps them as plain objects."""
        return self.peer.plain

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Start the program and wait for its mount; at the end unmount and wait until it has ended."""
        fresh(self.folder)
        place = Place(self.server, self.folder / "mnt", self.folder / "cache", self.folder)
        place.target.mkdir()
        place.cache.mkdir()
        self.peer.prepare(place)
        drop_caches()
        began = time.monotonic()
        environment = {**self.peer.environment(place), **trusting(self.server)}
        with child(self.peer.command(place), environment=environment) as started:

            def mounted() -> bool:
                started.alive()
                return is_mounted(place.target)

            def ended() -> bool:
                return started.process.poll() is not None

            try:
                wait_for(mounted, MOUNT_TIMEOUT_S, "not mounted")
                yield Opened(place.target, time.monotonic() - began, lambda: started.pid)
            finally:
                unmount(place.target)
            wait_for(ended, END_TIMEOUT_S, "the process did not end after the unmount")


def trusting(server: Server) -> Mapping[str, str]:
    """The environment variables that tell curl, Go programs and rclone the certificate authority."""
    names = ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "RCLONE_CA_CERT")
    return dict.fromkeys(names, server.ca_file) if server.ca_file else {}


def own_subjects(server: Server, folder: Path) -> list[Subject]:
    """Return our mounts (writable, read-only and with write-back), the plain client and the local disk."""
    for name in (NATIVE, LOCAL):
        os.makedirs(folder / name, exist_ok=True)
    return [
        Ours(OURS, server, folder / "o"),
        Ours(READ_ONLY, server, folder / "r", {"readOnly": True}),
        Ours(WRITE_BACK, server, folder / "w", {"writeBack": {"maxDelay": "30s"}}),
        Directory(NATIVE, folder / NATIVE, native=True, remote=True),
        Directory(LOCAL, folder / LOCAL),
    ]
