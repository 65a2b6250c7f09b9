"""Saves the names of each directory that is read in several calls, so that a new server continues with these names.

Each open directory has a JSON document of file types and names, named after the handle. It is written with the first
answer, unless that has all names, and removed at the close.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path


class SavedListings:
    """Owns one directory. It has no lock: its owner makes one call after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._saved = {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}

    def save(self, fh: int, entries: Iterable[tuple[int, bytes]]) -> None:
        """Save the (file type, name) in this order. Disk errors are ignored: the listing is served without them."""
        temporary = self._directory / "new"
        try:
            temporary.write_text(json.dumps([(kind, os.fsdecode(name)) for kind, name in entries]))
            temporary.replace(self._directory / str(fh))
        except OSError:
            return
        self._saved.add(fh)

    def load(self, fh: int) -> list[tuple[int, bytes]] | None:
        """Return what was saved; None if nothing was, or if it can't be read (another release may have written it)."""
        if fh not in self._saved:
            return None
        try:
            entries = json.loads((self._directory / str(fh)).read_text())
        except (OSError, ValueError):
            return None
        return [(kind, os.fsencode(name)) for kind, name in entries]

    def forget(self, fh: int) -> None:
        """Remove what was saved for a handle, which was closed; unknown handles are ignored."""
        if fh in self._saved:
            self._saved.discard(fh)
            (self._directory / str(fh)).unlink(missing_ok=True)
