"""Writes of open files: into the staging file, and to the store at fsync and close (S-18 to S-24)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ...data.multipart import OBJECT_MAX
from ...data.staging import StagedFile
from ...ops import Fh, FSError, Ino
from ..tree import facts
from ..tree.attrs import without_suidgid
from ..tree.core import Core
from ..tree.nodes import Node
from ..upload.uploads import Uploads
from .handles import Handles
from .writeback import WriteBack

_ZEROS_AT_ONCE = 4 << 20
"""So many bytes of a range that becomes zero are written before others run."""


def refuse_beyond(size: int) -> None:
    """FSError(EFBIG) for a file that no object can hold: all of it, holes too, would be sent before that is said."""
    if size > OBJECT_MAX:
        raise FSError(errno.EFBIG)


@dataclass(eq=False, repr=False)
class Writing:
    """What write, truncate, fallocate, fsync and flush do."""

    _core: Core
    _uploads: Uploads
    _handles: Handles
    _write_back: WriteBack

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """Into the staging file; at once unless the node is busy or part of a block must be fetched."""
        node = self._handles.node_of(ino, fh)
        if not payload:
            return 0
        refuse_beyond(offset + len(payload))
        if node.unknown:
            await self._handles.confirm(node)
        if not node.lock.try_acquire():
            await node.lock.acquire()
        try:
            staged = self._uploads.stage(node)
            gaps = staged.missing_for_write(offset, len(payload))
            if gaps:
                await self._uploads.fill(staged, gaps)
            if not staged.dirty_ranges:
                staged.grows_since = self._core.clock.monotonic()
            written = staged.write(offset, payload)
            self._core.passthrough.write(node.ino, offset, payload)
            self.modified(node, kill_suidgid=kill_suidgid)
            return written
        finally:
            node.lock.release()

    def modified(self, node: Node, *, kill_suidgid: bool = False) -> None:
        """The staged content changed: size and times follow, and setuid and setgid may fall. node.lock is held."""
        staged = node.staged
        assert staged is not None
        now = self._core.now_ns()
        staged.written_at = self._core.clock.monotonic()
        staged.times_set = False
        had = node.attributes
        mode = without_suidgid(had.mode) if kill_suidgid else had.mode
        facts.edited(node, had._replace(mode=mode, mtime_ns=now, ctime_ns=now), staged.size)
        if not staged.journaled:
            self._uploads.record(node)
        if staged.size >= staged.stream_at:
            self._uploads.grown(node)

    async def truncate(self, node: Node, size: int, *, kill_suidgid: bool = False) -> None:
        """Set the size in the staging file. node.lock is held; may fetch the last block."""
        refuse_beyond(size)
        staged = self._uploads.stage(node) if size else await self._uploads.restart(node)
        if 0 < size < staged.size:
            await self._uploads.fill(staged, staged.missing(size - size % 4096, size))
        staged.truncate(size)
        self._core.passthrough.truncate(node.ino, size)
        self.modified(node, kill_suidgid=kill_suidgid)
        self._uploads.record(node)

    async def flush(self, ino: Ino, fh: Fh) -> None:
        """close(2): what this handle may have written goes to the store."""
        handle = self._handles.get(fh)
        node = self._handles.node_of(ino, fh)
        if not self._uploads.owes(node) or (handle is not None and not handle.writable):
            return
        if self._write_back.on:
            await self._write_back.close(node)
            return
        # Who can read may have mapped the file, and what is written to the map comes after the close.
        only_writes = handle is not None and handle.flags & os.O_ACCMODE == os.O_WRONLY
        await self._uploads.flush(node, unread=only_writes and node.handles == 1)

    async def fsync(self, ino: Ino, fh: Fh) -> None:
        """fsync(2): the same, through any handle."""
        node = self._handles.node_of(ino, fh)
        if node.dirty and not node.gone:
            await self._uploads.flush(node)

    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        """mode 0, KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE; FSError(EOPNOTSUPP) otherwise."""
        keep_size, punch, zero = mode & 1, mode & 2, mode & 16
        if mode & ~(1 | 2 | 16) or (punch and not keep_size):
            raise FSError(errno.EOPNOTSUPP)
        if not keep_size:
            refuse_beyond(offset + length)
        node = self._handles.node_of(ino, fh)
        if node.unknown:
            await self._handles.confirm(node)
        async with node.lock:
            staged = self._uploads.stage(node)
            if punch or zero:
                await self._uploads.fill(staged, staged.missing_for_write(offset, length))
                await self._zero(node, staged, offset, length)
            if not keep_size and offset + length > staged.size:
                staged.truncate(offset + length)
                self._core.passthrough.truncate(node.ino, staged.size)
            self.modified(node)

    async def _zero(self, node: Node, staged: StagedFile, offset: int, length: int) -> None:
        """Make a range inside the size zero, in steps that end with a block; others run in between."""
        at, stop = offset, min(offset + length, staged.size)
        while at < stop:
            step = min(stop - at, _ZEROS_AT_ONCE - at % _ZEROS_AT_ONCE)
            staged.zero(at, step)
            self._core.passthrough.zero(node.ino, at, step)
            at += step
            await self._core.loop.pause()
