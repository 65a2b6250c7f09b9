"""Reads the CPU time and the memory of all processes in a control group, v1 or v2.

Sources: cgroups(7), the kernel's admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The directories of one control group, in the hierarchies of v1 or of v2 (unified). None: it has none there."""

    cpu: Path | None = None
    accounting: Path | None = None
    memory: Path | None = None
    unified: Path | None = None

    @property
    def all(self) -> list[Path]:
        """The directories that the group has, each once: several controllers of v1 may share a hierarchy."""
        return list(dict.fromkeys(each for each in (self.cpu, self.accounting, self.memory, self.unified) if each))

    def below(self, name: str) -> Places:
        """Return the directories of the child group with this name."""
        each = (self.cpu, self.accounting, self.memory, self.unified)
        cpu, accounting, memory, unified = (place / name if place else None for place in each)
        return Places(cpu=cpu, accounting=accounting, memory=memory, unified=unified)

    def cpu_s(self) -> float | None:
        """Return the CPU seconds so far, with those of ended processes; None where nothing can be read."""
        if self.unified:
            usage = field_of(self.unified / "cpu.stat", "usage_usec")
            return None if usage is None else usage / 1e6
        nanoseconds = _number(self.accounting / "cpuacct.usage") if self.accounting else None
        return None if nanoseconds is None else nanoseconds / 1e9

    def memory_bytes(self) -> int | None:
        """Return the memory in use without the inactive part of the file cache; None where nothing can be read."""
        directory = self.unified or self.memory
        if directory is None:
            return None
        used = _number(directory / ("memory.current" if self.unified else "memory.usage_in_bytes"))
        cached = field_of(directory / "memory.stat", "inactive_file" if self.unified else "total_inactive_file")
        return None if used is None else max(0, used - (cached or 0))


def field_of(path: Path, name: str) -> int | None:
    """Return the number after a name, from a file whose lines have a name and a number; None if it can't be read."""
    try:
        found = dict(line.split(" ", 1) for line in path.read_text().splitlines() if " " in line)
        return int(found[name])
    except (OSError, ValueError, KeyError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
