"""Reads the mount table from /proc/self/mountinfo (proc(5)). No mount is touched, because a dead one could hang."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
FSTYPE = "fuse.datastore"
"""The type of the mounts that our own server serves."""
SUPERVISED = (FSTYPE, "fuse.glusterfs")
"""The types of mounts that are served by a process that we start and replace."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount. device: major:minor, the same for all bind mounts of a file system. options: the file system's own."""

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
        """Return the topmost mount at a path, which is absolute and without symbolic links; None when there is none."""
        return next((mount for mount in reversed(self.mounts) if mount.mountpoint == path), None)

    def count(self, path: str) -> int:
        """Return how many mounts are stacked at a path."""
        return sum(mount.mountpoint == path for mount in self.mounts)


def parse(text: str) -> MountTable:
    """Return the table in the text of mountinfo; lines with another format are skipped. Pure."""
    mounts = []
    for line in text.split("\n"):  # not splitlines(): names may have other line separators unescaped
        left, separator, right = line.partition(" - ")
        fixed, described = left.split(" "), right.split(" ")
        if separator and len(fixed) >= 6 and len(described) >= 2:
            read_only = "ro" in fixed[5].split(",")
            options = tuple(described[2].split(",")) if len(described) > 2 else ()
            mounts.append(Mount(fixed[2], _plain(fixed[4]), read_only, described[0], _plain(described[1]), options))
    return MountTable(mounts)


def read() -> MountTable:
    """Return the table of this mount namespace; an empty one where the system has none."""
    try:
        return parse(os.fsdecode(MOUNTINFO.read_bytes()))
    except FileNotFoundError:
        return MountTable([])


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found.group(1), 8)), text)
