"""Files that were removed while they are open: what a new server needs so that those who have them go on.

One JSON document for each, beside a hard link to its staging file (which goes with the name, as the directory of
unsent files is kept clean by its journal). Written before the object is removed. A fresh mount needs none of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Removed(NamedTuple):
    """One file without a name. hidden_key: the object that has its bytes, '' when they are in `content`.

    staging: the name that the journal of unsent files has for those bytes, '' for none.
    name (bytes as text, surrogateescape) and parent: what it was called. metadata: its attributes, as an object's.
    """

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
    """Owns one directory; safe for many threads, as each file is one node's, under that node's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def content(self, ino: int) -> Path:
        """Where the bytes of a file are, when they are not in a hidden object."""
        return self._directory / f"{ino}.bytes"

    def record(self, row: Removed, staging: Path | None) -> None:
        """Keep a file; staging: the file with its bytes, or None. OSError."""
        self.forget(row.ino)
        if staging is not None:
            os.link(staging, self.content(row.ino))
        temporary = self._directory / f"{row.ino}.new"
        temporary.write_text(json.dumps(row))
        temporary.replace(self._directory / f"{row.ino}.json")

    def forget(self, ino: int) -> None:
        """Nobody has it open any more, or it was not removed after all. Idempotent."""
        (self._directory / f"{ino}.json").unlink(missing_ok=True)
        self.content(ino).unlink(missing_ok=True)

    def load(self) -> list[Removed]:
        """All of them; what was being written when a process died is dropped."""
        found = [Removed(*json.loads(path.read_text())) for path in sorted(self._directory.glob("*.json"))]
        known = {row.ino for row in found}
        for path in self._directory.iterdir():
            if int(path.stem) not in known:
                path.unlink()
        return found

    def clear(self) -> None:
        """A fresh mount: nothing is open."""
        for path in self._directory.iterdir():
            path.unlink()
