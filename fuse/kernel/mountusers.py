"""Who uses a mount, read from /proc without touching the mount: asking a dead or busy one could hang. proc(5)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


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
