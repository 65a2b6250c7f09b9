"""Whose figures are measured: our mounts, the plain client, the local disk, and the peers; each opened cold."""

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
    """A directory to work in. seconds: how long mounting took; pid: of the process that serves it, if there is one."""

    root: Path
    seconds: float = 0.0
    pid: Callable[[], int | None] = lambda: None


class Subject(Protocol):
    """plain: it shows the prepared objects. remote: what it writes is to be found in S3. native: not a directory.
    late: it is known to answer changes before S3 has them."""

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
        """Cold: nothing cached anywhere. Errors: NotReady, RuntimeError, OSError."""
        ...


@dataclass(slots=True)
class Ours:
    """A mount by the `datastore` command. folder: must have a short path, there is a Unix socket in it."""

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
        """Not with readOnly."""
        return not self.spec.get("readOnly", False)

    @property
    def client(self) -> Client:
        """The machine on which it is mounted."""
        return Client(self.folder)

    @property
    def target(self) -> Path:
        """The mount point."""
        return self.folder / "mnt"

    def server_pid(self) -> int | None:
        """Of the mount server now, as `datastore status` says."""
        pid = json.loads(self.client.run("status", self.target, "-o", "json").stdout).get("serverPid")
        return pid if isinstance(pid, int) else None

    def mount(self) -> None:
        """Mount, with whatever is cached."""
        self.client.run("mount", self.folder / "datastore.yaml", NAME, self.target)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """A machine that has never mounted it; with an error everything is left at once."""
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
    """A directory of the disk that the caches are on; also where the plain client puts what it gets."""

    name: str
    root: Path
    native: bool = False
    plain: bool = True
    writable: bool = True
    remote: bool = False
    late: bool = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """With the page cache dropped."""
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
        """The peer's."""
        return self.peer.name

    @property
    def plain(self) -> bool:
        """The peer's."""
        return self.peer.plain

    @property
    def late(self) -> bool:
        """The peer's."""
        return self.peer.late

    @property
    def remote(self) -> bool:
        """What is not kept as plain objects can't be looked for."""
        return self.peer.plain

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Started, mounted, unmounted and ended."""
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
    """Where curl, Go's programs and rclone look for a certificate authority."""
    names = ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "RCLONE_CA_CERT")
    return dict.fromkeys(names, server.ca_file) if server.ca_file else {}


def own_subjects(server: Server, folder: Path) -> list[Subject]:
    """Ours, writable, read-only and with write-back; the plain client; the disk."""
    for name in (NATIVE, LOCAL):
        os.makedirs(folder / name, exist_ok=True)
    return [
        Ours(OURS, server, folder / "o"),
        Ours(READ_ONLY, server, folder / "r", {"readOnly": True}),
        Ours(WRITE_BACK, server, folder / "w", {"writeBack": {"maxDelay": "30s"}}),
        Directory(NATIVE, folder / NATIVE, native=True, remote=True),
        Directory(LOCAL, folder / LOCAL),
    ]
