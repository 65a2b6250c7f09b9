"""The names of directories that are being read in several pieces, so that a new server goes on with the same ones.

One JSON document for each, named after the handle: file types and names. Written with the first piece when that is not
the whole, removed at the close.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path


class SavedListings:
    """Owns one directory. Not locked: who owns it sees to the order."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._saved = {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}

    def save(self, fh: int, entries: Iterable[tuple[int, bytes]]) -> None:
        """Keep (file type, name) in order. A disk that is full is no reason to refuse a listing."""
        temporary = self._directory / "new"
        try:
            temporary.write_text(json.dumps([(kind, os.fsdecode(name)) for kind, name in entries]))
            temporary.replace(self._directory / str(fh))
        except OSError:
            return
        self._saved.add(fh)

    def load(self, fh: int) -> list[tuple[int, bytes]] | None:
        """What was saved, or None: a server of another version may have written it otherwise."""
        if fh not in self._saved:
            return None
        try:
            entries = json.loads((self._directory / str(fh)).read_text())
        except (OSError, ValueError):
            return None
        return [(kind, os.fsencode(name)) for kind, name in entries]

    def forget(self, fh: int) -> None:
        """It was closed; unknown handles are ignored."""
        if fh in self._saved:
            self._saved.discard(fh)
            (self._directory / str(fh)).unlink(missing_ok=True)

    def clear(self) -> None:
        """A fresh mount: nothing is being read."""
        for fh in list(self._saved):
            self.forget(fh)
