"""Mounts of a GlusterFS volume, made by the real command."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.glusterfs.server import GlusterServer
from tests.mount.mounts import CommandMount
from tests.tools.mounting import NAME


@dataclass
class VolumeMount(CommandMount):
    """A mount of a directory of a volume."""

    server: GlusterServer
    folder: Path
    glusterfs: dict[str, Any] = field(default_factory=dict)
    transport: str = "kernel"
    spec: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    pids: list[int] = field(default_factory=list)

    def manifest(self) -> str:
        """Of the Datastore."""
        place = {"servers": [self.server.address], "volume": "digits", **self.glusterfs}
        document = {
            "apiVersion": "datastore.dev/v1alpha1",
            "kind": "Datastore",
            "metadata": {"name": NAME},
            "spec": {"glusterfs": place, **self.spec},
        }
        return yaml.safe_dump(document)


@contextlib.contextmanager
def made(
    server: GlusterServer, home: Path, *, glusterfs: dict[str, Any] | None = None, **spec: Any
) -> Iterator[VolumeMount]:
    """A machine that may mount it, on which nothing is left at the end. home: a directory with a short path."""
    mount = VolumeMount(server, Path(tempfile.mkdtemp(prefix="g", dir=home)), glusterfs or {}, spec=spec)
    try:
        yield mount
    finally:
        mount.end()
