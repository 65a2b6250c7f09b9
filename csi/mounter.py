"""What mounts the volumes of a node: our own engine over FUSE (fusemounter.py), or the kernel (kernelmounter.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from datastore.api.mountspec import MountSpec

from .textformat import Sample

LARGEST_BYTES = 1 << 50
"""What a volume without capacity shows, as the statfs of a bucket's mount does."""
INODES = 1 << 32
"""And of its files: a bucket has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountHandle:
    """A volume that is mounted on this node. spec: as it is mounted now. ephemeral: an inline volume of a pod."""

    volume_id: str
    spec: MountSpec
    ephemeral: bool


class Stats(NamedTuple):
    """What a volume shows, as its statfs does; used may be more than total. condition: how it is mounted, for people.

    trouble: what is wrong with it, or ''.
    """

    total_bytes: int
    used_bytes: int
    total_files: int
    used_files: int
    condition: str
    trouble: str = ""


class Mounter(Protocol):
    """Blocking; every call ends within its deadlines, whatever has become of a mount or its server.

    One call at a time for a volume (volumes.py); calls for several volumes side by side.
    """

    def volumes(self) -> list[str]:
        """The volumes that it has mounted on this node, as far as it knows."""
        ...

    def get(self, volume_id: str) -> MountHandle | None:
        """One of these."""
        ...

    def mount(self, volume_id: str, spec: MountSpec, *, ephemeral: bool) -> None:
        """Mounted as the specification says, anew or already; idempotent.

        A mount that stands is brought to what the specification says as far as that is possible without a remount.
        """
        ...

    def renew(self, volume_id: str, spec: MountSpec) -> None:
        """The same for a mount that stands; one that does not is left alone."""
        ...

    def unmount(self, volume_id: str, mountpoint: str, *, force: bool) -> None:
        """Send what is left, unmount, forget; an unknown volume is success, and what lies at `mountpoint` goes.

        force: unmount also when something could not be sent. Errors: Unsent.
        """
        ...

    def resize(self, volume_id: str, size_bytes: int) -> None:
        """Show it so large, where that is not the server's to say."""
        ...

    def stats(self, volume_id: str) -> Stats:
        """What a volume shows. Never waits for a mount that does not answer."""
        ...

    def adopt(self) -> None:
        """Go on with what an earlier process of the node plugin had mounted. Errors: NotAnswering: try again."""
        ...

    def metrics(self) -> list[Sample]:
        """Of its volumes, for Prometheus; never waits for a mount that does not answer."""
        ...
