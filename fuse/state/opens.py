"""A table of the open files and their versions, which outlives the server, so that the next server continues with them.

Each open file has a slot of 128 bytes in a memory map of a local file, so an open costs no system call. The table stays
in the page cache when the process dies; after a reboot, which unmounts, it is not needed. A slot counts while its first
eight bytes, the handle, are not zero; they are written last.
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
    """One open file. flags: as in open(2). size: the version's; NFS and SFTP put 0 there.
    tag: in a mount of a bucket the etag of the open version, '' for none and for one of more than 96 bytes; for NFS the
    identity of the caller that opened the file."""

    fh: int
    ino: int
    flags: int
    tag: str
    size: int


class OpenTable:
    """Owns the file. It has no lock: its owner makes one call after another. With a full disk it is only in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots: dict[int, tuple[int, int]] = {}
        """The offset of the slot and the inode, by handle."""
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
        self._free.reverse()  # so that pop() takes the first slots first

    def _mapped(self, size: int) -> mmap.mmap:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate alone: an access to a page for which the disk has no room would kill the process (SIGBUS).
            if os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size)
        except OSError:
            return mmap.mmap(-1, size)
        finally:
            os.close(fd)

    def load(self) -> list[Opened]:
        """Return all open files, in the order of their handles."""
        found = []
        for at, _ in self._slots.values():
            fh, ino, flags, length, size, tag = _SLOT.unpack_from(self._map, at)
            found.append(Opened(fh, ino, flags, tag[:length].decode("utf-8", "surrogateescape"), size))
        return sorted(found)

    def clear(self) -> None:
        """Remove all: in a fresh mount no file is open."""
        for fh in list(self._slots):
            self.remove(fh)

    def add(self, fh: int, ino: int, flags: int, tag: str, size: int) -> None:
        """Add an open file; fh is not zero and not in the table."""
        if not self._free:
            self._grow()
        at = self._free.pop()
        self._slots[fh] = at, ino
        self._by_ino[ino].append(at)
        length, tag_bytes = _encoded(tag)
        _REST.pack_into(self._map, at + _HANDLE.size, ino, flags & 0xFFFFFFFF, length, size, tag_bytes)
        _HANDLE.pack_into(self._map, at, fh)

    def remove(self, fh: int) -> None:
        """Remove a handle that was closed; unknown handles are ignored."""
        if fh not in self._slots:
            return
        at, ino = self._slots.pop(fh)
        _HANDLE.pack_into(self._map, at, 0)
        self._free.append(at)
        self._by_ino[ino].remove(at)
        if not self._by_ino[ino]:
            del self._by_ino[ino]

    def moved_on(self, ino: int, tag: str, size: int) -> None:
        """Record another version for all handles of an inode: this mount or another client wrote the file."""
        if ino in self._by_ino:
            length, tag_bytes = _encoded(tag)
            for at in self._by_ino[ino]:
                _VERSION.pack_into(self._map, at + _VERSION_AT, length, size, tag_bytes)

    def close(self) -> None:
        """Close the memory map. Idempotent."""
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
