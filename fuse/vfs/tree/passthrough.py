"""Cache files that the kernel reads by itself: FUSE passthrough of completely cached files (S-52).

The kernel keeps an inode in one mode while it is open. So handles that write to a file that is read by passthrough are
opened with direct I/O, and this server writes their bytes to the cache file too, after taking it out of the cache. No
other mount passes the same file through: an flock on it outlives this process, because the kernel has the same open
file description. After the death of a server the cache file can't be updated any more: later opens go through the new
server, past the kernel's pages. Changes are made with the node's lock held.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...data.blockcache import BlockCache
from ...data.blockfile import write_fully
from ...loop import Loop
from ...ops import Ino
from ...store.base import ObjectVersion

MIN_BYTES = 1 << 20
"""Smaller files are read from the kernel's pages: OPEN and RELEASE cost more than the copy saved (docs/decisions)."""
FILES_MAX = 1024
_STEP = 8 << 20


@dataclass(slots=True)
class _File:
    fd: int
    version: ObjectVersion
    changed: bool = False
    """Whether the file has left the cache, because its bytes differ from the version's."""
    right: bool = True
    """Whether the file has the bytes that the node has."""


class PassthroughFiles:
    """INVARIANT: a passthrough file that is `right` has its node's content, whichever client changes that."""

    def __init__(self, cache: BlockCache, loop: Loop) -> None:
        self._cache = cache
        self._loop = loop
        self._files: dict[Ino, _File] = {}
        self._checking: set[ObjectVersion] = set()

    def offer(self, ino: Ino, version: ObjectVersion) -> int:
        """Return a descriptor to read this version from, which stays ours; -1 when there is none, or none yet."""
        if version.size < MIN_BYTES or len(self._files) >= FILES_MAX or not version.etag:
            return -1
        self.returned(ino)
        fd = self._cache.open_for_passthrough(version)
        if fd is None:
            if version not in self._checking and self._cache.present(version):
                self._checking.add(version)
                self._loop.background(self._check(version))
            return -1
        self._files[ino] = _File(fd, version)
        return fd

    def right(self, ino: Ino) -> bool:
        """Whether there is a passthrough file, and it has the node's content."""
        file = self._files.get(ino)
        return file is not None and file.right

    def available(self, version: ObjectVersion) -> bool:
        """Whether offer() would find a descriptor for the next open of this version."""
        fd = self._cache.open_for_passthrough(version)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def returned(self, ino: Ino) -> bool:
        """Close the passthrough file of an inode, if it has one, and return whether it had one. Idempotent."""
        file = self._files.pop(ino, None)
        if file is not None:
            os.close(file.fd)
        return file is not None

    def write(self, ino: Ino, offset: int, payload: bytes | memoryview) -> None:
        self._change(ino, lambda fd: write_fully(fd, memoryview(payload), offset))

    def truncate(self, ino: Ino, size: int) -> None:
        self._change(ino, lambda fd: os.ftruncate(fd, size))

    async def grow(
        self,
        ino: Ino,
        old: ObjectVersion,
        new: ObjectVersion,
        fetch: Callable[[ObjectVersion, int, int], Awaitable[bytes]],
    ) -> bool:
        """Append what another client appended; return whether the file has it. Errors: whatever fetch() raises; the
        next call then begins at the end of `old` again.
        """
        file = self._files.get(ino)
        if file is None or not file.right:
            return False
        for at in range(old.size, new.size, _STEP):
            body = await fetch(new, at, min(_STEP, new.size - at))
            if self._files.get(ino) is not file:
                return False  # the file was closed during the fetch
            self.write(ino, at, body)
        return file.right

    def close(self) -> None:
        """Close all passthrough files; idempotent."""
        for ino in list(self._files):
            self.returned(ino)

    def _change(self, ino: Ino, change: Callable[[int], None]) -> None:
        file = self._files.get(ino)
        if file is None or not file.right:
            return
        try:
            if not file.changed:
                self._cache.drop(file.version)
                file.changed = True
                if os.fstat(file.fd).st_nlink:
                    raise OSError("it could not be taken out of the cache")
            change(file.fd)
        except OSError:
            file.right = False  # no room, or a busy cache: later opens of the file are served by this server

    async def _check(self, version: ObjectVersion) -> None:
        await self._loop.on_disk(self._cache.verify, version)
        self._checking.discard(version)
