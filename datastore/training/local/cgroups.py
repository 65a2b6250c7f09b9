"""A cgroup for each replica: limits of processors and memory, and what it uses; v1 and v2. Nothing where not allowed.

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
"""The kernel's own default: a limit of half a processor is 50 ms in each 100 ms."""
FOLDER = "datastore-jobs"
_EMPTY_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: without limit. processors: such as 0.5."""

    processors: float | None = None
    memory_bytes: int | None = None


class Group:
    """The group of one replica. Without directories every call does nothing, and nothing can be read."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._cpu, self._memory, self._unified = places.cpu, places.memory, places.unified
        self.directories = places.all

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command line that starts a command inside the group, so that nothing of it is ever outside."""
        if not self.directories:
            return list(command)
        script = 'for each in $0; do echo 0 > "$each/cgroup.procs" || exit 126; done; exec "$@"'
        return ["/bin/sh", "-c", script, " ".join(map(str, self.directories)), *command]

    def make(self, limits: Limits) -> None:
        """Make it anew, with these limits. Errors: OSError."""
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
        """Processor seconds so far."""
        return self._places.cpu_s()

    def memory_bytes(self) -> int | None:
        """Memory in use, but for what is only cache of files."""
        return self._places.memory_bytes()

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process of it for its limit."""
        if self._unified:
            return bool(field_of(self._unified / "memory.events", "oom_kill"))
        return bool(self._memory and field_of(self._memory / "memory.oom_control", "oom_kill"))

    def remove(self) -> None:
        """After its processes have ended; they may need a moment."""
        for directory in self.directories:
            _remove(directory)


@dataclass(frozen=True, slots=True)
class Parents:
    """Where the groups of a job's replicas are made. why_not: '' or why there are none."""

    places: Places = field(default_factory=Places)
    why_not: str = ""

    def group(self, name: str) -> Group:
        """The group of one replica."""
        return Group(self.places.below(name))

    def remove(self) -> None:
        """With those of replicas that a launcher left, whose processes have ended."""
        for parent in self.places.all:
            with suppress(OSError):
                for each in [*(each for each in parent.iterdir() if each.is_dir()), parent]:
                    _remove(each)


def parents(job: str, root: Path = ROOT, own: Path = OWN) -> Parents:
    """Make the directory of a job's groups where this user may; else say why not. Each user has names of his own."""
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
    """Our own group, where the whole tree is shown, or only our part of it."""
    own = mount / path.lstrip("/")
    return own if own.is_dir() else mount


def _delegated(root: Path, path: str, job: str) -> Path:
    """In v2 a group with processes can't limit its children: as root they are made below the root group."""
    parent = root if os.geteuid() == 0 else _visible(root, path)
    directory = parent / FOLDER / job
    for each in (parent, directory.parent, directory):
        if each != parent:
            each.mkdir(exist_ok=True)
        (each / "cgroup.subtree_control").write_text("+cpu +memory")
    return directory


def _remove(directory: Path) -> None:
    """Its processes have been ended, and may need a moment until they are gone."""
    deadline = time.monotonic() + _EMPTY_TIMEOUT_S
    while directory.exists():
        try:
            directory.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return
            time.sleep(0.01)
