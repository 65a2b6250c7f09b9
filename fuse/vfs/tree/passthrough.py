"""Cache files that the kernel reads by itself: FUSE passthrough of wholly cached files (S-52).

The kernel takes one way per inode while it is open, so writers that come while a file is read by passthrough come to
us, and what they write is written to the cache file too: it has left the cache by then, and nobody else reads it so
(an flock on the open file that the kernel holds, so that it outlives this process). After the death of a server the
cache file can't be followed any more: opens that come then go through us, past the kernel's pages.
Changes are made with the node's lock held.
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
"""Smaller files are read from the kernel's pages: OPEN and RELEASE cost more than the copy (docs/decisions)."""
FILES_MAX = 1024
_STEP = 8 << 20


@dataclass(slots=True)
class _File:
    fd: int
    version: ObjectVersion
    changed: bool = False
    """It has left the cache, because it has other bytes than the version."""
    right: bool = True
    """It has the bytes that the node has."""


class PassthroughFiles:
    """INVARIANT: a passthrough file that is right has the content of its node, whoever changes that."""

    def __init__(self, cache: BlockCache, loop: Loop) -> None:
        self._cache = cache
        self._loop = loop
        self._files: dict[Ino, _File] = {}
        self._checking: set[ObjectVersion] = set()

    def offer(self, ino: Ino, version: ObjectVersion) -> int:
        """A descriptor to read this version from, ours; -1 when there is none, or not yet."""
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
        """Whether who reads the passthrough file reads what the node has."""
        file = self._files.get(ino)
        return file is not None and file.right

    def available(self, version: ObjectVersion) -> bool:
        """Whether offer() would have a descriptor for whoever opens this version next."""
        fd = self._cache.open_for_passthrough(version)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def returned(self, ino: Ino) -> bool:
        """Nobody has the inode open any more; whether it was file. Idempotent."""
        file = self._files.pop(ino, None)
        if file is not None:
            os.close(file.fd)
        return file is not None

    def write(self, ino: Ino, offset: int, payload: bytes | memoryview) -> None:
        self._change(ino, lambda fd: write_fully(fd, memoryview(payload), offset))

    def truncate(self, ino: Ino, size: int) -> None:
        self._change(ino, lambda fd: os.ftruncate(fd, size))

    def zero(self, ino: Ino, offset: int, length: int) -> None:
        """A range of the node inside its size, a few MiB at most, became zeros."""
        self._change(ino, lambda fd: write_fully(fd, memoryview(bytes(length)), offset))

    async def grow(
        self, ino: Ino, new: ObjectVersion, fetch: Callable[[ObjectVersion, int, int], Awaitable[bytes]]
    ) -> bool:
        """Another client appended: whether the passthrough file has the new end now. Raises what fetch raises."""
        file = self._files.get(ino)
        if file is None or not file.right:
            return False
        start = os.fstat(file.fd).st_size
        for at in range(start, new.size, _STEP):
            body = await fetch(new, at, min(_STEP, new.size - at))
            if self._files.get(ino) is not file:
                return False  # it was closed meanwhile
            self.write(ino, at, body)
        return file.right

    def close(self) -> None:
        """Let go of all; idempotent."""
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
            file.right = False  # no room, or a busy cache: those who open the file from now on are served by us

    async def _check(self, version: ObjectVersion) -> None:
        await self._loop.on_disk(self._cache.verify, version)
        self._checking.discard(version)
