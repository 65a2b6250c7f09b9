"""How each open inode is open: by passthrough to a local file, or through us.

The kernel takes one way per inode at a time; a second open that differs fails with EIO (measured, docs/decisions). So
the first open decides, the others follow until the last release, and the backing id is closed only then: closing it
right after the reply races with the opener. The kernel keeps all this while a server dies, so the table lies in memory
that the supervisor holds. Threads: the loop's; count() and why_not() are for any.
INVARIANT: an inode has a slot
while it has opens; its backing id is 0 for 'through us'. Opens may be counted twice when a crash falls between
counting and answering, never too few: then the way stays as it is for longer, and no open fails.
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
TABLE_BYTES = (SLOTS + 1) * SLOT.size
OVERFLOWED = 0
"""Slot 0 counts opens that found no slot; the inodes they are of are not known after a restart."""


class OpenModes:
    """The table. table_fd: TABLE_BYTES of zeroed memory, or of a server that died; -1 for memory of our own."""

    def __init__(self, device_fd: int, table_fd: int = -1) -> None:
        self._device_fd = device_fd
        self.enabled = False
        self.drops_pages = False
        """A write past the kernel's pages drops those that were read meanwhile, before it returns."""
        self.refusal = ""
        """Why the kernel last refused a local file; '' when it never did."""
        self._table = mmap.mmap(table_fd, TABLE_BYTES)
        slots = list(SLOT.iter_unpack(self._table[:]))
        self._unknown = bool(slots[OVERFLOWED][2])
        self._slots = {ino: index for index, (ino, _, opens) in enumerate(slots) if opens and index != OVERFLOWED}
        self._free = [index for index in range(SLOTS, OVERFLOWED, -1) if not slots[index][2]]

    def opened(self, ino: int, open_flags: int, reply: OpenReply) -> tuple[int, int]:
        """FOPEN flags and backing id for the answer to an OPEN or CREATE."""
        # nothing to flush when nothing can be written: spares a request per close
        flags = abi.FOPEN_NOFLUSH if open_flags & os.O_ACCMODE == os.O_RDONLY else 0
        if self.enabled:
            backing_id = self._count_open(ino, reply.passthrough_fd)
            if backing_id:
                # both: the inode stays in its mode, and this open's reads and writes come to us (docs/decisions)
                flags |= abi.FOPEN_DIRECT_IO if reply.direct_io else 0
                return flags | abi.FOPEN_PASSTHROUGH, backing_id
        if reply.keep_cache:
            flags |= abi.FOPEN_KEEP_CACHE
        direct_io = reply.direct_io or (reply.uncached and self.drops_pages)
        return (flags | abi.FOPEN_DIRECT_IO, 0) if direct_io else (flags, 0)

    def released(self, ino: int) -> None:
        """One open less."""
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
        """Whether the inode is open by passthrough; None: no inode ever is."""
        if not self.enabled:
            return None
        index = self._slots.get(ino)
        return index is not None and SLOT.unpack_from(self._table, index * SLOT.size)[1] != 0

    def why_not(self) -> str:
        """Why no file is read by passthrough; '' where that is possible."""
        if self.enabled:
            return f"the kernel refused the cache's files: {self.refusal}" if self.refusal else ""
        if os.geteuid():
            return "passthrough needs root (CAP_SYS_ADMIN)"
        return "this kernel has no FUSE passthrough (Linux 6.9)"

    def count(self) -> int:
        """How many inodes are open by passthrough."""
        return sum(1 for index in list(self._slots.values()) if SLOT.unpack_from(self._table, index * SLOT.size)[1])

    def _count_open(self, ino: int, local_fd: int) -> int:
        """The inode's backing id, or 0."""
        index = self._slots.get(ino)
        if index is not None:
            _, backing_id, opens = SLOT.unpack_from(self._table, index * SLOT.size)
        elif self._free:
            index = self._slots[ino] = self._free.pop()
            backing_id = 0 if local_fd < 0 or self._unknown else self._open_backing(local_fd)
            opens = 0
        else:
            SLOT.pack_into(self._table, OVERFLOWED, 0, 0, 1)
            self._unknown = True
            return 0
        SLOT.pack_into(self._table, index * SLOT.size, ino, backing_id, opens + 1)
        return int(backing_id)

    def _open_backing(self, local_fd: int) -> int:
        # bytearray: with immutable bytes fcntl.ioctl gives the bytes back and not the id
        wanted = bytearray(abi.BACKING_MAP.pack(local_fd, 0, 0))
        try:
            return int(fcntl.ioctl(self._device_fd, abi.IOC_BACKING_OPEN, wanted))
        except OSError as error:
            self.refusal = os.strerror(error.errno or 0)
            return 0  # EPERM without CAP_SYS_ADMIN, ELOOP on a stacked file system: read through us instead
