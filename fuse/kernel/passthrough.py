"""How each open inode is open: by passthrough to a local file, or through us.

The kernel takes one way per inode at a time; a second open that differs fails with EIO (measured, docs/decisions). So the first
open decides, the others follow until the last release, and the backing id is closed only then: closing it right after the
reply races with the opener. Threads: any; one lock, held across the ioctl (microseconds).
INVARIANT: an inode is in _opens exactly while it has opens; its backing id is 0 for 'through us'.
"""

from __future__ import annotations

import fcntl
import os
import threading

from ..ops import OpenReply
from . import abi


class OpenModes:
    """The table. enabled: INIT settled on passthrough (root only)."""

    def __init__(self, device_fd: int, *, enabled: bool) -> None:
        self._device_fd = device_fd
        self.enabled = enabled
        self._lock = threading.Lock()
        self._opens: dict[int, list[int]] = {}  # ino: [backing id, opens]

    def opened(self, ino: int, open_flags: int, reply: OpenReply) -> tuple[int, int]:
        """FOPEN flags and backing id for the answer to an OPEN or CREATE."""
        # nothing to flush when nothing can be written: spares a request per close
        flags = abi.FOPEN_NOFLUSH if open_flags & os.O_ACCMODE == os.O_RDONLY else 0
        if self.enabled:
            backing_id = self._backing(ino, reply.passthrough_fd)
            if backing_id:
                return flags | abi.FOPEN_PASSTHROUGH, backing_id
        if reply.keep_cache:
            flags |= abi.FOPEN_KEEP_CACHE
        return (flags | abi.FOPEN_DIRECT_IO, 0) if reply.direct_io else (flags, 0)

    def released(self, ino: int) -> None:
        """One open less; opens made before a restart are unknown and ignored."""
        if not self.enabled:
            return
        with self._lock:
            mode = self._opens.get(ino)
            if mode is None:
                return
            mode[1] -= 1
            if mode[1] == 0:
                del self._opens[ino]
                self._close_backing(mode[0])

    def count(self) -> int:
        """How many inodes are open by passthrough."""
        with self._lock:
            return sum(1 for backing_id, _ in self._opens.values() if backing_id)

    def _backing(self, ino: int, local_fd: int) -> int:
        with self._lock:
            mode = self._opens.get(ino)
            if mode is None:
                mode = self._opens[ino] = [self._open_backing(local_fd), 0]
            mode[1] += 1
            return mode[0]

    def _open_backing(self, local_fd: int) -> int:
        if local_fd < 0:
            return 0
        # bytearray: with immutable bytes fcntl.ioctl gives the bytes back and not the id
        try:
            return int(fcntl.ioctl(self._device_fd, abi.IOC_BACKING_OPEN, bytearray(abi.BACKING_MAP.pack(local_fd, 0, 0))))
        except OSError:
            return 0  # EPERM without CAP_SYS_ADMIN, ELOOP on a stacked file system: read through us instead

    def _close_backing(self, backing_id: int) -> None:
        if backing_id:
            fcntl.ioctl(self._device_fd, abi.IOC_BACKING_CLOSE, abi.BACKING_ID.pack(backing_id))
