"""How full a cache directory is, as its owner notes it: read by the owner, and by a node that watches over many."""

from __future__ import annotations

import os
import struct
from pathlib import Path

NAME = "usage"
"""The file in the directory."""
COUNT = struct.Struct("<q")
"""All that is in it: bytes, little-endian."""


def noted_bytes(directory: Path) -> int:
    """What the files of a cache directory take, as was noted last; 0 for none."""
    try:
        fd = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        return parsed(os.pread(fd, COUNT.size, 0)) or 0
    finally:
        os.close(fd)


def parsed(noted: bytes) -> int | None:
    """The number in these bytes; None: it was lost."""
    return max(0, int(COUNT.unpack(noted)[0])) if len(noted) == COUNT.size else None
