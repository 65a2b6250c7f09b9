"""A cgroup for each mount, with a limit for its memory, below the daemon's own; v1 and v2. Nothing where not allowed.

The scheduler knows of this memory: it is inside what the daemon's pod requests and may use. A mount's server stays
below a limit of its own by itself (MountSpec.memory_bytes); should it ever not, the kernel ends a process of that
mount only, and it is replaced. Sources: cgroups(7), the kernel's admin-guide/cgroup-v1/memory and cgroup-v2.
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
BESIDE_BYTES = 128 << 20
"""For the supervisor, and the server that stands by (measured: 25 and 35 MB)."""
LEAF = "daemon"
"""In v2 a group with processes can't limit its children: the daemon itself moves into a child of its own."""


def limit_of(memory_bytes: int) -> int:
    """The limit of a mount's processes together, with so much memory for its server; bytes.

    Half as much again, because the server looks at its size four times a second, and what it wrote to files is counted
    too until the disk has it.
    """
    return memory_bytes + memory_bytes // 2 + BESIDE_BYTES


def group_name(volume_id: str) -> str:
    """The directory of a volume's group, safe whatever the id is."""
    return f"datastore-{hashlib.sha256(volume_id.encode()).hexdigest()[:16]}"


class Cgroup:
    """The group of one mount; without a directory (None) every call does nothing."""

    def __init__(self, directory: Path | None, limit_file: str = "", limit_bytes: int = 0) -> None:
        self.directory = directory
        self._limit_file = limit_file
        self._limit_bytes = limit_bytes

    def make(self) -> None:
        """Idempotent. Where it may not be made the mount lives without."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(exist_ok=True)
            (self.directory / self._limit_file).write_text(str(self._limit_bytes))
        except OSError as error:
            log.warning("no cgroup for a mount", extra=fields(directory=self.directory, error=error))
            self.directory = None

    def raise_to(self, limit_bytes: int) -> None:
        """A higher limit, at once; a lower one counts for the next mount, because what is above it would be killed."""
        if limit_bytes > self._limit_bytes:
            self._limit_bytes = limit_bytes
            self.make()

    def add(self, pid: int) -> None:
        """This process, and whom it starts from now on."""
        if self.directory is None:
            return
        try:
            (self.directory / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            log.warning("a process stays outside its cgroup", extra=fields(pid=pid, error=error))

    def remove(self) -> None:
        """After its processes have ended; idempotent."""
        if self.directory is not None:
            with suppress(OSError):  # busy for a moment longer: made again, it is the same one
                self.directory.rmdir()


class Cgroups:
    """Where the mounts' groups are made."""

    def __init__(self, root: Path = ROOT, own: Path = OWN) -> None:
        self._parent, self._limit_file = _place(root, own)
        if self._parent is None:
            log.warning("no cgroup of ours can be written; mounts have no limit of memory but their own care")

    def of(self, volume_id: str, memory_bytes: int) -> Cgroup:
        """The group of a volume's mount, whose server may take so much memory."""
        if self._parent is None:
            return Cgroup(None)
        return Cgroup(self._parent / group_name(volume_id), self._limit_file, limit_of(memory_bytes))


def _place(root: Path, own: Path) -> tuple[Path | None, str]:
    """The directory to make groups in, and the name of the limit's file."""
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
    return (found, "memory.max") if found and _delegated(found) else (None, "")


def _visible(mount: Path, path: str) -> Path | None:
    """Our group, where the container shows the whole tree, or only our part of it."""
    for candidate in (mount / path.lstrip("/"), mount):
        if (candidate / "cgroup.procs").exists():
            return candidate if os.access(candidate / "cgroup.procs", os.W_OK) else None
    return None


def _delegated(group: Path) -> bool:
    """Let the children of our v2 group limit memory, which needs the group itself to be empty."""
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
