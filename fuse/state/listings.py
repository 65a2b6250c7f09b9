"""The names of directories that are being read in several pieces, so that a new server goes on with the same ones.

One file for each, named after the handle: records of file type, length of the name, name. Written with the first piece
when that is not the whole, removed at the close.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from struct import Struct

_HEAD = Struct("<IH")


class SavedListings:
    """Owns one directory. Not locked: who owns it sees to the order."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._saved = {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}

    def save(self, fh: int, entries: Iterable[tuple[int, bytes]]) -> None:
        """Keep (file type, name) in order. A disk that is full is no reason to refuse a listing."""
        body = b"".join(_HEAD.pack(kind, len(name)) + name for kind, name in entries)
        temporary = self._directory / "new"
        try:
            temporary.write_bytes(body)
            temporary.replace(self._directory / str(fh))
        except OSError:
            return
        self._saved.add(fh)

    def load(self, fh: int) -> list[tuple[int, bytes]] | None:
        """What was saved, or None."""
        if fh not in self._saved:
            return None
        content = (self._directory / str(fh)).read_bytes()
        entries, at = [], 0
        while at < len(content):
            kind, length = _HEAD.unpack_from(content, at)
            at += _HEAD.size + length
            entries.append((kind, content[at - length : at]))
        return entries

    def forget(self, fh: int) -> None:
        """It was closed; unknown handles are ignored."""
        if fh in self._saved:
            self._saved.discard(fh)
            (self._directory / str(fh)).unlink(missing_ok=True)

    def clear(self) -> None:
        """A fresh mount: nothing is being read."""
        for fh in list(self._saved):
            self.forget(fh)
