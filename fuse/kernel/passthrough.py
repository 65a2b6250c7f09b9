"""Records how each open inode is open: by passthrough to a local file, or through this server.

The kernel allows one of these modes per inode at a time; an open in the other mode fails with EIO (measured,
docs/decisions). So the first open decides, and the others follow until the last release. Only then the backing id is
closed: closing it right after the reply races with the opener. The kernel keeps all this when a server dies, so the
table is in memory that the supervisor holds. Only the loop's thread may use it, but any may call count() and why_not().
INVARIANT: an inode has a slot while it has opens, unless the table was full; backing id 0 means 'through this server'.
A crash between counting an open and answering it may count it twice, never too seldom: the inode keeps its mode for
longer, and no open fails. The file system offers no local file for an inode that is open already.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from struct import Struct

from ..ops import OpenReply
from . import abi

SLOT = Struct("<QII")  # ino, backing id, opens; a slot without opens is free
SLOTS = 16_384
TABLE_BYTES = SLOTS * SLOT.size


class OpenModes:
    """The table. table_fd: TABLE_BYTES of memory, zeroed or from a server that died; -1: memory of this process."""

    def __init__(self, device_fd: int, table_fd: int = -1) -> None:
        self._device_fd = device_fd
        self.enabled = False
        self.drops_pages = False
        """Whether a write past the kernel's page cache drops the pages that were read during it, before it returns."""
        self.refusal = ""
        """Why the kernel last refused to open a local file for passthrough; '' if it never did."""
        self._table = mmap.mmap(table_fd, TABLE_BYTES)
        slots = list(enumerate(SLOT.iter_unpack(self._table[:])))
        self._slots = {ino: index for index, (ino, _, opens) in slots if opens}
        self._free = [index for index, (_, _, opens) in reversed(slots) if not opens]

    def opened(self, ino: int, open_flags: int, reply: OpenReply) -> tuple[int, int]:
        """Count an open, and return the FOPEN flags and the backing id for the answer to its OPEN or CREATE."""
        # a file that is open only for reading has nothing to flush; this spares one request per close
        flags = abi.FOPEN_NOFLUSH if open_flags & os.O_ACCMODE == os.O_RDONLY else 0
        if self.enabled:
            backing_id = self._count_open(ino, reply.passthrough_fd)
            if backing_id:
                # with both flags the inode keeps its mode, but this handle's I/O comes to us (docs/decisions/0009)
                flags |= abi.FOPEN_DIRECT_IO if reply.direct_io else 0
                return flags | abi.FOPEN_PASSTHROUGH, backing_id
        if reply.keep_cache:
            flags |= abi.FOPEN_KEEP_CACHE
        direct_io = reply.direct_io or (reply.uncached and self.drops_pages)
        return (flags | abi.FOPEN_DIRECT_IO, 0) if direct_io else (flags, 0)

    def released(self, ino: int) -> None:
        """Count a release; after the inode's last one, close its backing id."""
        if not self.enabled:
            return
        index = self._slots.get(ino)
        if index is None:
            return
        _, backing_id, opens = SLOT.unpack_from(self._table, index * SLOT.size)
        SLOT.pack_into(self._table, index * SLOT.size, ino, backing_id, opens - 1)
        if opens == 1:
            del self._slots[ino]
            self._free.append(index)
            if backing_id:
                fcntl.ioctl(self._device_fd, abi.IOC_BACKING_CLOSE, abi.BACKING_ID.pack(backing_id))

    def is_local(self, ino: int) -> bool | None:
        """Return whether the inode is open by passthrough; None: no inode of this mount ever is."""
        if not self.enabled:
            return None
        index = self._slots.get(ino)
        return index is not None and SLOT.unpack_from(self._table, index * SLOT.size)[1] != 0

    def why_not(self) -> str:
        """Return why no file is read by passthrough, or '' where passthrough is possible."""
        if self.enabled:
            return f"the kernel refused the cache's files: {self.refusal}" if self.refusal else ""
        if os.geteuid():
            return "passthrough needs root (CAP_SYS_ADMIN)"
        return "this kernel has no FUSE passthrough (Linux 6.9)"

    def count(self) -> int:
        """Return how many inodes are open by passthrough."""
        return sum(1 for index in list(self._slots.values()) if SLOT.unpack_from(self._table, index * SLOT.size)[1])

    def _count_open(self, ino: int, local_fd: int) -> int:
        """Count an open of the inode and return its backing id; 0: the inode is open through this server."""
        index = self._slots.get(ino)
        if index is not None:
            _, backing_id, opens = SLOT.unpack_from(self._table, index * SLOT.size)
        elif self._free:
            index = self._slots[ino] = self._free.pop()
            backing_id = 0 if local_fd < 0 else self._open_backing(local_fd)
            opens = 0
        else:
            return 0
        SLOT.pack_into(self._table, index * SLOT.size, ino, backing_id, opens + 1)
        return int(backing_id)

    def _open_backing(self, local_fd: int) -> int:
        # a bytearray, because with immutable bytes fcntl.ioctl returns these bytes and not the id
        wanted = bytearray(abi.BACKING_MAP.pack(local_fd, 0, 0))
        try:
            return int(fcntl.ioctl(self._device_fd, abi.IOC_BACKING_OPEN, wanted))
        except OSError as error:
            self.refusal = os.strerror(error.errno or 0)
            return 0  # EPERM without CAP_SYS_ADMIN, ELOOP on a stacked file system: read through us instead
