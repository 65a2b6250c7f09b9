"""Mounts of a GlusterFS volume, made by the real command."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.glusterfs.server import GlusterServer
from tests.mount.mounts import CommandMount


@dataclass
class VolumeMount(CommandMount):
    """A mount of a directory of a volume."""

    server: GlusterServer
    glusterfs: dict[str, Any] = field(default_factory=dict)

    def backend(self) -> dict[str, Any]:
        """See CommandMount."""
        return {"glusterfs": {"servers": [self.server.address], "volume": "digits", **self.glusterfs}}


@contextlib.contextmanager
def made(
    server: GlusterServer, home: Path, *, glusterfs: dict[str, Any] | None = None, **spec: Any
) -> Iterator[VolumeMount]:
    """A machine that may mount it, on which nothing is left at the end. home: a directory with a short path."""
    mount = VolumeMount(server, glusterfs or {}, folder=Path(tempfile.mkdtemp(prefix="g", dir=home)), spec=spec)
    try:
        yield mount
    finally:
        mount.end()
