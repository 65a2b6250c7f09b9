"""Limits and measures each replica by a cgroup, v1 or v2. Where this user may not make cgroups, it does nothing.

Sources: cgroups(7), the kernel's admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from datastore.cgroupfiles import Places, field_of

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PERIOD_US = 100_000
"""The kernel's default period, in which a limit of half a processor allows 50 ms of 100 ms."""
FOLDER = "datastore-jobs"
_EMPTY_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one replica; None: no limit. processors: a number that may be fractional, such as 0.5."""

    processors: float | None = None
    memory_bytes: int | None = None


class Group:
    """The cgroup of one replica. If it has no directories, calls do nothing and figures are None."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._cpu, self._memory, self._unified = places.cpu, places.memory, places.unified
        self.directories = places.all

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return a command line that enters the group and then starts the command, so all its processes are inside."""
        if not self.directories:
            return list(command)
        script = 'for each in $0; do echo 0 > "$each/cgroup.procs" || exit 126; done; exec "$@"'
        return ["/bin/sh", "-c", script, " ".join(map(str, self.directories)), *command]

    def make(self, limits: Limits) -> None:
        """Create the group and set its limits. Errors: OSError."""
        for directory in self.directories:
            directory.mkdir(parents=True, exist_ok=True)
        if limits.processors is not None:
            quota_us = max(1000, round(limits.processors * PERIOD_US))
            if self._unified:
                (self._unified / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            elif self._cpu:
                (self._cpu / "cpu.cfs_quota_us").write_text(str(quota_us))
        if limits.memory_bytes is not None:
            if self._unified:
                (self._unified / "memory.max").write_text(str(limits.memory_bytes))
            elif self._memory:
                (self._memory / "memory.limit_in_bytes").write_text(str(limits.memory_bytes))

    def cpu_s(self) -> float | None:
        """Return the CPU seconds so far; None where they can't be read."""
        return self._places.cpu_s()

    def memory_bytes(self) -> int | None:
        """Return the memory in use without the inactive part of the file cache; None where it can't be read."""
        return self._places.memory_bytes()

    def out_of_memory(self) -> bool:
        """Return whether the kernel killed a process of the group because of the memory limit."""
        if self._unified:
            return bool(field_of(self._unified / "memory.events", "oom_kill"))
        return bool(self._memory and field_of(self._memory / "memory.oom_control", "oom_kill"))

    def remove(self) -> None:
        """Remove the group after its processes have ended; wait up to _EMPTY_TIMEOUT_S until the kernel allows that."""
        for directory in self.directories:
            _remove(directory)


@dataclass(frozen=True, slots=True)
class Parents:
    """The directories in which the groups of a job's replicas are made. why_not: why there are none, else ''."""

    places: Places = field(default_factory=Places)
    why_not: str = ""

    def group(self, name: str) -> Group:
        """Return the group of the replica with this name."""
        return Group(self.places.below(name))

    def remove(self) -> None:
        """Remove the directories and all groups in them, also those that a dead launcher left, without processes."""
        for parent in self.places.all:
            with suppress(OSError):
                for each in [*(each for each in parent.iterdir() if each.is_dir()), parent]:
                    _remove(each)


def parents(job: str, root: Path = ROOT, own: Path = OWN) -> Parents:
    """Create the directories of a job's groups, or return why this user may not. The uid is part of their names."""
    job = f"{os.geteuid()}-{job}"
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError as error:
        return Parents(why_not=f"this system has no cgroups ({error.strerror})")
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    try:
        if "memory" in paths:
            made = {name: _made(root / name, paths.get(name), job) for name in ("cpu", "cpuacct", "memory")}
            return Parents(Places(cpu=made["cpu"], accounting=made["cpuacct"], memory=made["memory"]))
        return Parents(Places(unified=_delegated(root, paths.get("", "/"), job)))
    except OSError as error:
        return Parents(why_not=f"cgroups can't be written by this user ({error.strerror})")


def _made(hierarchy: Path, path: str | None, job: str) -> Path | None:
    if path is None:
        return None
    directory = _visible(hierarchy, path) / FOLDER / job
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return directory


def _visible(mount: Path, path: str) -> Path:
    """Return the directory of our own group. It is the mount itself if that shows only our part of the tree."""
    own = mount / path.lstrip("/")
    return own if own.is_dir() else mount


def _delegated(root: Path, path: str, job: str) -> Path:
    """Create a job's directory in v2. A group with processes can't limit children, so root uses the root group."""
    parent = root if os.geteuid() == 0 else _visible(root, path)
    directory = parent / FOLDER / job
    for each in (parent, directory.parent, directory):
        if each != parent:
            each.mkdir(exist_ok=True)
        (each / "cgroup.subtree_control").write_text("+cpu +memory")
    return directory


def _remove(directory: Path) -> None:
    """Remove a group. Its processes have been ended, but it may take a moment until they are gone."""
    deadline = time.monotonic() + _EMPTY_TIMEOUT_S
    while directory.exists():
        try:
            directory.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return
            time.sleep(0.01)
