"""Unsent files that are young: a line each at the end of a log, where a transaction costs ten times as much.

Most files are in the store a moment after they were made, and then nobody asks for their rows. A line is the JSON of an
Unsent, or the name of a staging file whose row counts no more; a row whose file is removed counts for nothing either.
write(2) puts it where it outlives the death of all processes; what is to outlive a power cut goes to the database, and
so does what the next process finds here (StateDb). A line that is cut off or damaged is ignored.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

from .rows import Unsent

NAME = "unsent.log"
_EMPTIED_BYTES = 1 << 20
LONG_BYTES = 4 << 20
"""Of a log that is so long the database should take what is here, so that it can begin anew."""


class YoungRows:
    """Owns the file. Not locked: its database's lock covers it.

    INVARIANT: what load() would give are the rows, and some of which the files are removed.
    """

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, Unsent] = {}
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        self._unsaid = b""
        """Names that the disk had no room for."""

    def load(self) -> list[Unsent]:
        """What an earlier process left."""
        found: dict[str, Unsent] = {}
        whole, _, _ = self._path.read_bytes().rpartition(b"\n")
        for text in whole.split(b"\n"):
            with suppress(ValueError, TypeError):  # a later release may have fields that we don't know, but not fewer
                line = json.loads(text)
                if isinstance(line, str):
                    found.pop(line, None)
                elif isinstance(line, dict):
                    row = Unsent(**{name: value for name, value in line.items() if name in Unsent._fields})
                    found[row.staging] = row
        return list(found.values())

    def put(self, row: Unsent) -> None:
        """Insert, or replace the row of the same file. OSError(ENOSPC); the row that was there stays then."""
        self._append(json.dumps(row._asdict()).encode())
        self.rows[row.staging] = row

    def drop(self, staging: str, *, removed: bool = False) -> None:
        """It counts no more; without room on the disk that is said with the next line. removed: its file is."""
        if self.rows.pop(staging, None) is None:
            return
        if not self.rows and self.size > _EMPTIED_BYTES:
            self.clear()
        elif not removed:
            name = json.dumps(staging).encode()
            try:
                self._append(name)
            except OSError:
                self._unsaid += name + b"\n"

    def clear(self) -> None:
        """Begin anew, without rows. OSError."""
        os.ftruncate(self._fd, 0)
        self.rows, self.size, self._unsaid = {}, 0, b""

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: bytes) -> None:
        text = self._unsaid + line + b"\n"
        written = os.write(self._fd, text)
        if written < len(text):
            os.ftruncate(self._fd, self.size)
            raise OSError(errno.ENOSPC, "the disk of the state directory is full")
        self.size += written
        self._unsaid = b""
