"""Mounts of an export, made by the real command, and the export as its host sees it."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mount.mounts import CommandMount
from tests.nfs.host.guest import Guest

TTL_S = 0.3
"""metadataTTL of mounts whose tests change things behind their back."""


@dataclass
class ExportMount(CommandMount):
    """A mount of an export, over libnfs: this machine's kernel has no NFS client."""

    server: str
    export: str

    def backend(self) -> dict[str, Any]:
        """See CommandMount."""
        return {"nfs": {"server": self.server, "path": self.export}}


@contextlib.contextmanager
def mounted(
    host: Guest, export: str, home: Path, *, options: tuple[str, ...] = (), **spec: Any
) -> Iterator[ExportMount]:
    """A mount of a machine of its own, ended at the end. home: a directory with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="n", dir=home))
    made = ExportMount(host.address, export, folder=folder, spec=spec, options=options)
    try:
        made.mount()
        yield made
    finally:
        made.end()


def on_the_host(host: Guest, directory: str) -> dict[str, str]:
    """What the host's own disk has below a directory: path -> sha256."""
    listed = host.shell(f"cd {directory} && find . -type f -exec sha256sum {{}} +")
    return {name[2:]: digest for digest, name in (line.split("  ", 1) for line in listed.splitlines())}


def digest(content: bytes) -> str:
    """As on_the_host() gives it."""
    return hashlib.sha256(content).hexdigest()
