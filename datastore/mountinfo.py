"""What is mounted where, from /proc/self/mountinfo, without touching a mount: a dead one could hang who asks.

Format: proc(5).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
FSTYPE = "fuse.datastore"
"""Of mounts that our engine serves."""
SUPERVISED = (FSTYPE, "fuse.glusterfs")
"""Of mounts behind which is a process that we start and replace."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line. device: major:minor, the same for all bind mounts of a file system. options: the file system's own."""

    device: str
    mountpoint: str
    read_only: bool
    fstype: str
    source: str
    options: tuple[str, ...] = ()


class MountTable:
    """All mounts, the oldest first."""

    def __init__(self, mounts: list[Mount]) -> None:
        self.mounts = mounts

    def at(self, path: str) -> Mount | None:
        """What is mounted there, on top; `path` is absolute, without links."""
        return next((mount for mount in reversed(self.mounts) if mount.mountpoint == path), None)

    def count(self, path: str) -> int:
        """How many mounts lie there, one on the other."""
        return sum(mount.mountpoint == path for mount in self.mounts)


def parse(text: str) -> MountTable:
    """Lines of another shape are left out. Pure."""
    mounts = []
    for line in text.split("\n"):  # not splitlines(): the kernel writes other ends of lines in a name as they are
        left, separator, right = line.partition(" - ")
        fixed, described = left.split(" "), right.split(" ")
        if separator and len(fixed) >= 6 and len(described) >= 2:
            read_only = "ro" in fixed[5].split(",")
            options = tuple(described[2].split(",")) if len(described) > 2 else ()
            mounts.append(Mount(fixed[2], _plain(fixed[4]), read_only, described[0], _plain(described[1]), options))
    return MountTable(mounts)


def read() -> MountTable:
    """This mount namespace's table; empty where the system has none."""
    try:
        return parse(os.fsdecode(MOUNTINFO.read_bytes()))
    except FileNotFoundError:
        return MountTable([])


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found.group(1), 8)), text)
