"""The file in which a mount notes how full its cache is; the node plugin, which bounds all caches, reads it too."""

from __future__ import annotations

import os
import struct
from pathlib import Path

NAME = "usage"
"""The name of the file in the cache directory."""
COUNT = struct.Struct("<q")
"""The whole content of the file: a number of bytes, little-endian."""


def noted_bytes(directory: Path) -> int:
    """Return how many bytes the files of a cache directory take, as last noted; 0 when there is no valid note."""
    try:
        fd = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        return parsed(os.pread(fd, COUNT.size, 0)) or 0
    finally:
        os.close(fd)


def parsed(noted: bytes) -> int | None:
    """Return the number of bytes in the content of the file; None when the content is incomplete."""
    return max(0, int(COUNT.unpack(noted)[0])) if len(noted) == COUNT.size else None
