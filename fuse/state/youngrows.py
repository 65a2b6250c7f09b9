"""A log of the rows of young unsent files: a line at its end costs a tenth of a transaction of the database.

Most files are in the store a moment after they were made, and their rows are never read. A line is the JSON of an
Unsent, or the name of a staging file whose row is dropped; a row whose file is removed counts for nothing either.
A line is written by write(2), so it survives the death of all processes. Rows that must survive a power cut go to the
database, as do the rows that the next process finds here (StateDb). A line that is cut off or damaged is ignored.
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
"""The size of the log from which on the database should take over its rows, so that the log can be emptied."""


class YoungRows:
    """Owns the log. It has no lock: the lock of its database guards it.

    INVARIANT: load() would return `rows`, and perhaps others whose files are removed or whose names are in _unsaid.
    """

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, Unsent] = {}
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        self._unsaid = b""
        """The lines of dropped rows for which the disk had no room; they are written with the next line."""

    def load(self) -> list[Unsent]:
        """Return the rows that an earlier process left. A torn end is cut off, as the next line would continue it."""
        found: dict[str, Unsent] = {}
        whole, end, torn = self._path.read_bytes().rpartition(b"\n")
        if torn:
            self.size = len(whole + end)
            os.ftruncate(self._fd, self.size)
        for text in whole.split(b"\n"):
            with suppress(ValueError, TypeError):  # a later release may have more fields than this one, but not fewer
                line = json.loads(text)
                if isinstance(line, str):
                    found.pop(line, None)
                elif isinstance(line, dict):
                    row = Unsent(**{name: value for name, value in line.items() if name in Unsent._fields})
                    found[row.staging] = row
        return list(found.values())

    def put(self, row: Unsent) -> None:
        """Insert a row, or replace that of the same staging file. Errors: OSError(ENOSPC); the old row stays then."""
        self._append(json.dumps(row._asdict()).encode())
        self.rows[row.staging] = row

    def drop(self, staging: str, *, removed: bool = False) -> None:
        """Drop a row; on a full disk the line for that is written later. removed: its staging file is gone already."""
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
        """Empty the log and drop all rows. Errors: OSError."""
        os.ftruncate(self._fd, 0)
        self.rows, self.size, self._unsaid = {}, 0, b""

    def close(self) -> None:
        """Close the log. Idempotent."""
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
