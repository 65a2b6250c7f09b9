"""The directories that are being read. SFTP has no cursors: the first call reads all names, and a cursor is an index in
their sorted list."""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
from collections.abc import Iterator
from itertools import count

from asyncssh import SFTPAttrs, SFTPClient

from datastore.logs import fields

from ..ops import DirBudget, Fh, FSError, Ino
from .calls import Calls
from .nodes import Node, Nodes

log = logging.getLogger(__name__)

LINE = struct.Struct("<IIIIIQ")
"""What follows the name and a zero byte in a packed directory entry: mode, uid, gid, atime, mtime, size."""
LINE_BYTES = 64
"""The memory of a packed entry besides its bytes: for a Python object, and its place in a list."""


class Listing:
    """A directory that is being read: its entries sorted by name, each packed, because there may be millions."""

    def __init__(self) -> None:
        self.lines: list[bytes] | None = None
        self.read_at = 0.0
        self.closed = False
        self.bytes = 0
        """The memory that `lines` take."""

    def within(self, budget: DirBudget, offset: int) -> Iterator[tuple[bytes, SFTPAttrs]]:
        """Yield the names and attributes from this index on that fit the budget."""
        lines = self.lines or []
        for at in range(offset, len(lines)):
            if not budget.take(len(lines[at]) - LINE.size - 1):
                return
            yield _unpacked(lines[at])


class Listings:
    """All listings of a mount. room: the memory for all of them together."""

    def __init__(self, calls: Calls, nodes: Nodes, room: int) -> None:
        self._calls = calls
        self._lock = nodes.lock
        self._room = room
        self._by_fh: dict[int, Listing] = {}
        self._fhs = count(time.time_ns())  # no fh of an earlier process is given out again

    def open(self) -> Fh:
        """Begin a listing and return its number."""
        fh = Fh(next(self._fhs))
        self._by_fh[fh] = Listing()
        return fh

    def get(self, fh: Fh) -> Listing:
        """Return a listing; one that an earlier process opened is read again."""
        return self._by_fh.setdefault(fh, Listing())

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        listing = self._by_fh.pop(fh, None)
        if listing is not None:
            listing.closed = True
            self._let_go(listing)

    def read(self, node: Node, listing: Listing) -> None:
        """Read all entries of a directory from the server. Errors: ENOMEM if they need more memory than there is."""
        self._let_go(listing)

        async def scan(sftp: SFTPClient, path: bytes, repeated: bool) -> list[bytes]:
            self._let_go(listing)
            lines = []
            async for found in sftp.scandir(path):
                lines.append(_packed(os.fsencode(found.filename), found.attrs))
                size = LINE_BYTES + len(lines[-1])
                with self._lock:
                    listing.bytes += size
                    self._room -= size
                    full = self._room < 0
                if full:
                    log.error(
                        "a directory has too many names to be listed; --memory lets more be",
                        extra=fields(path=path, names=len(lines)),
                    )
                    raise FSError(errno.ENOMEM)
            return lines

        try:
            lines = self._calls.ask("readdir", node, scan)
        except BaseException:
            self._let_go(listing)
            raise
        lines.sort()
        listing.lines, listing.read_at = lines, time.monotonic()
        if listing.closed:  # the caller was interrupted and has closed the directory
            self._let_go(listing)

    def _let_go(self, listing: Listing) -> None:
        with self._lock:
            self._room += listing.bytes
            listing.lines, listing.bytes = None, 0


def _packed(name: bytes, given: SFTPAttrs) -> bytes:
    """Pack a directory entry; a zero byte, which no name contains, ends the name, so that entries sort by name."""
    numbers = (given.permissions, given.uid, given.gid, given.atime, given.mtime, given.size)
    return name + b"\0" + LINE.pack(*(number or 0 for number in numbers))


def _unpacked(line: bytes) -> tuple[bytes, SFTPAttrs]:
    at = len(line) - LINE.size
    mode, uid, gid, atime, mtime, size = LINE.unpack_from(line, at)
    return line[: at - 1], SFTPAttrs(permissions=mode, uid=uid, gid=gid, atime=atime, mtime=mtime, size=size)
