"""Who uses a mount, read from /proc without touching the mount: asking a dead or busy one could hang. proc(5)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def _uses(process: Path, mountpoint: str) -> bool:
    below = mountpoint.rstrip("/") + "/"
    links = [process / "cwd", process / "root", process / "exe"]
    with suppress(OSError):  # another user's process, or it has just ended
        links += (process / "fd").iterdir()
    for link in links:
        with suppress(OSError):
            if f"{os.readlink(link)}/".startswith(below):
                return True
    with suppress(OSError):
        return f" {below}" in (process / "maps").read_text(errors="surrogateescape")
    return False


def users(mountpoint: str, proc: Path = PROC) -> list[str]:
    """Processes with a file, directory or mapping below the mountpoint, as `pid N (command)`, where we may look."""
    found = []
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        if _uses(process, mountpoint):
            with suppress(OSError):
                found.append(f"pid {process.name} ({(process / 'comm').read_text(errors='replace').strip()})")
    return found
