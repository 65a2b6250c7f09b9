"""The paths of open files, for messages: NFS knows a file by its handle, and the kernel asks for it by its number."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_INO = re.compile(r"^ino:\s*(\d+)$", re.MULTILINE)


def open_files(mountpoint: str, proc: Path = Path("/proc")) -> dict[int, str]:
    """Return the paths, below the mountpoint, of the files that processes have open there, by inode number. They are
    found in /proc (proc(5)), as far as we may look, since Linux 5.14; the mount is not touched, as it could hang."""
    below, found = mountpoint.rstrip("/") + "/", dict[int, str]()
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    path = os.readlink(link)
                    if path.startswith(below):
                        told = (process / "fdinfo" / link.name).read_text()
                        found.update((int(ino), path[len(below) :]) for ino in _INO.findall(told))
    return found
