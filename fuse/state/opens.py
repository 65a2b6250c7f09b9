"""Which files are open, and of which version: a table that outlives the server, so that its successor goes on.

One slot of 128 bytes for each open file, in a memory map of a local file: an open costs no system call. The death of
the process leaves the table in the page cache; a reboot unmounts, and nobody needs it then. A slot counts from the
moment its first eight bytes, the handle, are not zero: they are written last.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from pathlib import Path
from struct import Struct
from typing import NamedTuple

_SLOT = Struct("<QQIHxxq96s")
_REST = Struct("<QIHxxq96s")
_HANDLE = Struct("<Q")
_VERSION = Struct("<Hxxq96s")
_VERSION_AT = 20
_TAG_MAX = 96
_FIRST_SLOTS = 1024


class Opened(NamedTuple):
    """One open file: flags as open(2) has them.

    tag: what else its file system has to know: of objects the etag, '' when none, or an unusually long one, was open;
    of NFS who opened it.
    """

    fh: int
    ino: int
    flags: int
    tag: str
    size: int


class OpenTable:
    """Owns the file. Not locked: who owns it sees to the order. Without room on the disk it is kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots: dict[int, tuple[int, int]] = {}
        """By handle: where its slot begins, and the inode."""
        self._by_ino: defaultdict[int, list[int]] = defaultdict(list)
        had = path.stat().st_size // _SLOT.size if path.exists() else 0
        self._map = self._mapped(max(_FIRST_SLOTS, had) * _SLOT.size)
        self._free: list[int] = []
        for number, (fh, ino, *_) in enumerate(_SLOT.iter_unpack(self._map[:])):
            if fh:
                self._slots[fh] = number * _SLOT.size, ino
                self._by_ino[ino].append(number * _SLOT.size)
            else:
                self._free.append(number * _SLOT.size)
        self._free.reverse()  # the first ones are taken first

    def _mapped(self, size: int) -> mmap.mmap:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not only ftruncate: a page that the disk has no room for would end the process when it is touched.
            if os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size) if hasattr(os, "posix_fallocate") else os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        except OSError:
            return mmap.mmap(-1, size)
        finally:
            os.close(fd)

    def load(self) -> list[Opened]:
        """All that are open, in the order of their handles."""
        found = []
        for at, _ in self._slots.values():
            fh, ino, flags, length, size, tag = _SLOT.unpack_from(self._map, at)
            found.append(Opened(fh, ino, flags, tag[:length].decode("utf-8", "surrogateescape"), size))
        return sorted(found)

    def clear(self) -> None:
        """A fresh mount: nothing is open."""
        for fh in list(self._slots):
            self.remove(fh)

    def add(self, fh: int, ino: int, flags: int, tag: str, size: int) -> None:
        """A file was opened; fh is not zero and not in use."""
        if not self._free:
            self._grow()
        at = self._free.pop()
        self._slots[fh] = at, ino
        self._by_ino[ino].append(at)
        length, tag_bytes = _encoded(tag)
        _REST.pack_into(self._map, at + _HANDLE.size, ino, flags & 0xFFFFFFFF, length, size, tag_bytes)
        _HANDLE.pack_into(self._map, at, fh)

    def remove(self, fh: int) -> None:
        """It was closed; unknown handles are ignored."""
        if fh not in self._slots:
            return
        at, ino = self._slots.pop(fh)
        _HANDLE.pack_into(self._map, at, 0)
        self._free.append(at)
        self._by_ino[ino].remove(at)
        if not self._by_ino[ino]:
            del self._by_ino[ino]

    def moved_on(self, ino: int, tag: str, size: int) -> None:
        """Who has this file open goes on with another version: we wrote it, or it grew."""
        if ino in self._by_ino:
            length, tag_bytes = _encoded(tag)
            for at in self._by_ino[ino]:
                _VERSION.pack_into(self._map, at + _VERSION_AT, length, size, tag_bytes)

    def close(self) -> None:
        """Idempotent."""
        self._map.close()

    def _grow(self) -> None:
        old, size = self._map, len(self._map)
        self._map = self._mapped(2 * size)
        self._map[:size] = old[:]  # the same file, unless the disk is full
        old.close()
        self._free = list(range(2 * size - _SLOT.size, size - 1, -_SLOT.size))


def _encoded(tag: str) -> tuple[int, bytes]:
    encoded = tag.encode("utf-8", "surrogateescape")
    return (0, b"") if len(encoded) > _TAG_MAX else (len(encoded), encoded)
