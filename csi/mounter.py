"""The interface of the mounters of volumes: our engine over FUSE (fusemounter.py) and the kernel (kernelmounter.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from datastore.api.mountspec import MountSpec

from .textformat import Sample

LARGEST_BYTES = 1 << 50
"""The size that a volume without a capacity shows, as the statfs of a bucket's mount does."""
INODES = 1 << 32
"""The number of files that a volume shows as its limit; a bucket has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedVolume:
    """A volume that is mounted on this node. spec: its present settings. ephemeral: it is a pod's inline volume."""

    volume_id: str
    spec: MountSpec
    ephemeral: bool


class Stats(NamedTuple):
    """A volume's size and usage, as statfs shows them; used may exceed total. condition: how it is mounted, in words.

    trouble: what is wrong with the volume, or ''.
    """

    total_bytes: int
    used_bytes: int
    total_files: int
    used_files: int
    condition: str
    trouble: str = ""


class Mounter(Protocol):
    """A way to mount volumes. All calls block, but end within a time limit in whatever state a mount or its server is.

    volumes.py makes one call at a time for a volume; calls for several volumes run in parallel.
    """

    def volumes(self) -> list[str]:
        """Return the volumes that this mounter has mounted on the node, as far as it knows."""
        ...

    def get(self, volume_id: str) -> MountedVolume | None:
        """Return one of volumes(), or None for any other."""
        ...

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> None:
        """Mount the volume as the specification says; idempotent. To a volume that is mounted already the specification
        is applied as far as that is possible without a remount."""
        ...

    def renew(self, volume_id: str, spec: MountSpec) -> None:
        """Apply a specification as mount() does, but only if the volume is mounted."""
        ...

    def unmount(self, volume_id: str, mountpoint: str, *, force: bool) -> None:
        """Upload what is left, unmount, and forget the volume; even of an unknown volume `mountpoint` is unmounted.

        force: unmount even if something could not be uploaded. Errors: Unsent.
        """
        ...

    def resize(self, volume_id: str, size_bytes: int) -> None:
        """Show the volume with this size, unless its server reports the size."""
        ...

    def stats(self, volume_id: str) -> Stats:
        """Return size, usage and condition. Never waits for a mount that does not answer."""
        ...

    def adopt(self) -> None:
        """Take over what an earlier node plugin had mounted. Errors: NotAnswering; then the caller has to try again."""
        ...

    def metrics(self) -> list[Sample]:
        """Return its volumes' metrics for Prometheus. Never waits for a mount that does not answer."""
        ...
