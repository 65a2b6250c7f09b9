"""Files that were removed while open: everything that a new server needs so that programs can still use them.

Each has a JSON document and, if it has a staging file, a hard link to that file; the staging file's own name goes with
the file, because files without a row in the journal are removed there. Both are made before the object is removed.
They are not needed in a fresh mount.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Removed(NamedTuple):
    """One removed file. hidden_key: the object that has its bytes, '' when RemovedFiles.content() has them.
    staging: the name of its staging file in the journal, '' for none. name (bytes as text, surrogateescape) and parent:
    its name before the removal. metadata: its attributes, as user metadata of an object."""

    ino: int
    parent: int
    name: str
    tail: str
    hidden_key: str
    staging: str
    etag: str
    size: int
    metadata: dict[str, str]


class RemovedFiles:
    """Owns one directory. Safe for threads, because each file belongs to one node, whose lock the caller holds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def content(self, ino: int) -> Path:
        """Return the path of a file's bytes, which exists if they are not in a hidden object."""
        return self._directory / f"{ino}.bytes"

    def record(self, row: Removed, staging: Path | None) -> None:
        """Keep what is needed of a file. staging: its staging file, or None. Errors: OSError."""
        self.forget(row.ino)
        if staging is not None:
            os.link(staging, self.content(row.ino))
        temporary = self._directory / f"{row.ino}.new"
        temporary.write_text(json.dumps(row))
        temporary.replace(self._directory / f"{row.ino}.json")

    def forget(self, ino: int) -> None:
        """Drop a file that is not open any more, or that was not removed after all. Idempotent."""
        (self._directory / f"{ino}.json").unlink(missing_ok=True)
        self.content(ino).unlink(missing_ok=True)

    def load(self) -> list[Removed]:
        """Return all files. What a process had not written completely when it died is removed."""
        found = [Removed(*json.loads(path.read_text())) for path in sorted(self._directory.glob("*.json"))]
        known = {row.ino for row in found}
        for path in self._directory.iterdir():
            if int(path.stem) not in known:
                path.unlink()
        return found
