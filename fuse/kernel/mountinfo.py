"""What is mounted and who uses it, read from /proc without touching the mounts: asking a dead or busy one could hang.

Formats: proc(5), /proc/pid/mountinfo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of mountinfo."""

    device: str
    """major:minor"""
    mountpoint: str
    fstype: str
    source: str


def _unescape(text: str) -> str:
    return OCTAL_ESCAPE.sub(lambda found: chr(int(found.group(1), 8)), text)


def parse(text: str) -> list[Mount]:
    """The mounts, oldest first; a later one at the same place lies on top. Lines of another shape are left out."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fixed, described = left.split(" "), right.split(" ")
        if separator and len(fixed) >= 6 and len(described) >= 2:
            mounts.append(Mount(fixed[2], _unescape(fixed[4]), described[0], _unescape(described[1])))
    return mounts


def at(mountpoint: str, proc: Path = PROC) -> Mount | None:
    """What is mounted there, on top; mountpoint is absolute and without symlinks."""
    raw = (proc / "self" / "mountinfo").read_bytes()
    found = [mount for mount in parse(os.fsdecode(raw)) if os.fsencode(mount.mountpoint) == os.fsencode(mountpoint)]
    return found[-1] if found else None


def _links(process: Path) -> Iterator[Path]:
    yield process / "cwd"
    yield process / "root"
    yield process / "exe"
    try:
        yield from (process / "fd").iterdir()
    except OSError:
        return  # another user's process, or it has just ended


def _uses(process: Path, mountpoint: str) -> bool:
    below = mountpoint.rstrip("/") + "/"
    for link in _links(process):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target == mountpoint or target.startswith(below):
            return True
    try:
        return f" {below}" in (process / "maps").read_text(errors="surrogateescape")
    except OSError:
        return False


def users(mountpoint: str, proc: Path = PROC) -> list[str]:
    """Processes with a file, directory or mapping below the mountpoint, as `pid N (command)`, where we may look."""
    found = []
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        if _uses(process, mountpoint):
            try:
                command = (process / "comm").read_text(errors="replace").strip()
            except OSError:
                continue
            found.append(f"pid {process.name} ({command})")
    return found
