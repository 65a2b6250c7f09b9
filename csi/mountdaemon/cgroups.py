"""A cgroup with a memory limit for each mount, below the daemon's own cgroup; v1 and v2. None where it is not allowed.

The scheduler accounts for this memory, because it is included in the requests and limits of the daemon's pod. A mount's
server stays below its own limit (MountSpec.memory_bytes). If it ever fails to, the kernel kills a process of this
mount only, which is replaced. Sources: cgroups(7), the kernel's admin-guide/cgroup-v1/memory and cgroup-v2.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from datastore.logs import fields

log = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
V2_LIMIT = "memory.max"
BESIDE_BYTES = 128 << 20
"""Memory for the supervisor and the standby server (measured: 25 and 35 MB)."""
LEAF = "daemon"
"""The child cgroup into which the daemon moves itself: in v2 a cgroup that has processes can't limit its children."""


def limit_of(memory_bytes: int) -> int:
    """Return the limit, in bytes, for all processes of a mount whose server may use memory_bytes.

    The server gets half as much again: it checks its size only four times a second, and its unwritten file pages count.
    """
    return memory_bytes + memory_bytes // 2 + BESIDE_BYTES


def group_name(volume_id: str) -> str:
    """Return the directory name of a volume's cgroup; it is safe for any id."""
    return f"datastore-{hashlib.sha256(volume_id.encode()).hexdigest()[:16]}"


class Cgroup:
    """The cgroup of one mount; without a directory (None) every method does nothing."""

    def __init__(self, directory: Path | None, limit_file: str = "", limit_bytes: int = 0) -> None:
        self.directory = directory
        self._limit_file = limit_file
        self._limit_bytes = limit_bytes

    def make(self) -> None:
        """Create the cgroup; if that fails the mount runs without one. Idempotent."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(exist_ok=True)
            (self.directory / self._limit_file).write_text(str(self._limit_bytes))
        except OSError as error:
            log.warning("no cgroup for a mount", extra=fields(directory=self.directory, error=error))
            self.directory = None

    def raise_to(self, limit_bytes: int) -> None:
        """Set a higher limit at once. A lower limit waits for the next mount: processes above it would be killed."""
        if limit_bytes > self._limit_bytes:
            self._limit_bytes = limit_bytes
            self.make()

    def add(self, pid: int) -> None:
        """Move a process, and with it all that it starts later, into the cgroup."""
        if self.directory is None:
            return
        try:
            (self.directory / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            log.warning("a process stays outside its cgroup", extra=fields(pid=pid, error=error))

    def oom_kills(self) -> int:
        """Return how many of its processes the kernel has killed because they exceeded the limit together."""
        if self.directory is None:
            return 0
        counted = self.directory / ("memory.events" if self._limit_file == V2_LIMIT else "memory.oom_control")
        try:
            words = counted.read_text().split()
            return int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError, IndexError):
            return 0

    def remove(self) -> None:
        """Remove the cgroup after its processes have ended. Idempotent."""
        if self.directory is not None:
            with suppress(OSError):  # still busy for a moment: then make() finds and uses it
                self.directory.rmdir()


class Cgroups:
    """Makes the mounts' cgroups."""

    def __init__(self, root: Path = ROOT, own: Path = OWN) -> None:
        self._parent, self._limit_file = _place(root, own)
        if self._parent is None:
            log.warning("no cgroup of ours can be written; mounts have no memory limit except their own")

    def of(self, volume_id: str, memory_bytes: int) -> Cgroup:
        """Return the cgroup for a volume's mount, whose server may use memory_bytes."""
        if self._parent is None:
            return Cgroup(None)
        return Cgroup(self._parent / group_name(volume_id), self._limit_file, limit_of(memory_bytes))


def _place(root: Path, own: Path) -> tuple[Path | None, str]:
    """Return the directory in which to make cgroups, None if there is none, and the name of the limit's file."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None, ""
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            found = _visible(root / "memory", path)
            return (found, "memory.limit_in_bytes") if found else (None, "")
    unified = next((path for number, controllers, path in lines if number == "0" and not controllers), None)
    if unified is None:
        return None, ""
    found = _visible(root, unified)
    return (found, V2_LIMIT) if found and _delegated(found) else (None, "")


def _visible(mount: Path, path: str) -> Path | None:
    """Return our own cgroup's directory if it is writable. A container shows the whole tree, or only our part of it."""
    for candidate in (mount / path.lstrip("/"), mount):
        if (candidate / "cgroup.procs").exists():
            return candidate if os.access(candidate / "cgroup.procs", os.W_OK) else None
    return None


def _delegated(group: Path) -> bool:
    """Enable memory limits for the children of our v2 cgroup, whose processes are moved to LEAF for that."""
    try:
        leaf = group / LEAF
        leaf.mkdir(exist_ok=True)
        for pid in (group / "cgroup.procs").read_text().split():
            (leaf / "cgroup.procs").write_text(pid)
        (group / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:
        log.warning("memory can't be limited below our cgroup", extra=fields(group=group, error=error))
        return False
    return True
