"""Writes of open files: into the staging file, and to the store at fsync and close (S-18 to S-24)."""

from __future__ import annotations

import errno
import os
from functools import partial

from ...data.multipart import OBJECT_MAX
from ...ops import Blocking, Fh, FSError, Ino, Reply
from ..tree import facts
from ..tree.attrs import without_suidgid
from ..tree.core import Core
from ..tree.nodes import Node
from ..upload.uploads import Uploads
from .handles import Handles
from .writeback import WriteBack


def refuse_beyond(size: int) -> None:
    """FSError(EFBIG) for a file that no object can hold: all of it, holes too, would be sent before that is said."""
    if size > OBJECT_MAX:
        raise FSError(errno.EFBIG)


class Writing:
    """What write, truncate, fallocate, fsync and flush do."""

    def __init__(self, core: Core, uploads: Uploads, handles: Handles, write_back: WriteBack) -> None:
        self._core = core
        self._write_back = write_back
        self._uploads = uploads
        self._handles = handles

    def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> Reply[int]:
        """Into the staging file; at once unless the node is busy or part of a block must be fetched."""
        node = self._handles.node_of(ino, fh)
        if not payload:
            return 0
        refuse_beyond(offset + len(payload))
        if node.unknown:
            return self._handles.after_asking(node, lambda: self.write(ino, fh, offset, payload, kill_suidgid))
        if node.lock.acquire(blocking=False):
            try:
                staged = self._uploads.stage(node)
                if not staged.missing_for_write(offset, len(payload)):
                    return self._write(node, offset, payload, kill_suidgid)
            finally:
                node.lock.release()
        return Blocking(partial(self._write_filling, node, offset, payload, kill_suidgid))

    def _write_filling(self, node: Node, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        with node.lock:
            staged = self._uploads.stage(node)
            self._uploads.fill(staged, staged.missing_for_write(offset, len(payload)))
            return self._write(node, offset, payload, kill_suidgid)

    def _write(self, node: Node, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        staged = node.staged
        assert staged is not None
        if not staged.dirty_ranges:
            staged.grows_since = self._core.clock.monotonic()
        written = staged.write(offset, payload)
        self._core.passthrough.write(node.ino, offset, payload)
        self.modified(node, kill_suidgid=kill_suidgid)
        return written

    def modified(self, node: Node, *, kill_suidgid: bool = False) -> None:
        """The staged content changed: size and times follow, and setuid and setgid may fall. node.lock is held."""
        staged = node.staged
        assert staged is not None
        now = self._core.now_ns()
        staged.written_at = self._core.clock.monotonic()
        staged.times_set = False
        with self._core.lock:
            had = node.attributes
            mode = without_suidgid(had.mode) if kill_suidgid else had.mode
            facts.edited(node, had._replace(mode=mode, mtime_ns=now, ctime_ns=now), staged.size)
        if not staged.journaled:
            self._uploads.record(node)
        if staged.size >= staged.stream_at:
            self._uploads.grown(node)

    def truncate(self, node: Node, size: int, *, kill_suidgid: bool = False) -> None:
        """Set the size in the staging file. node.lock is held; may fetch the last block."""
        refuse_beyond(size)
        staged = self._uploads.stage(node, empty=size == 0)
        if 0 < size < staged.size:
            self._uploads.fill(staged, staged.missing(size - size % 4096, size))
        staged.truncate(size)
        self._core.passthrough.truncate(node.ino, size)
        self.modified(node, kill_suidgid=kill_suidgid)
        self._uploads.record(node)

    def flush(self, ino: Ino, fh: Fh) -> Reply[None]:
        """close(2): what this handle may have written goes to the store."""
        handle = self._handles.get(fh)
        node = self._handles.node_of(ino, fh)
        if not self._uploads.owes(node) or (handle is not None and not handle.writable):
            return None
        if self._write_back.on:
            return Blocking(partial(self._write_back.close, node))
        # Who can read may have mapped the file, and what is written to the map comes after the close.
        only = node.handles == 1 and handle is not None and handle.flags & os.O_ACCMODE == os.O_WRONLY
        return Blocking(partial(self._uploads.close if only else self._uploads.flush, node))

    def fsync(self, ino: Ino, fh: Fh) -> Reply[None]:
        """fsync(2): the same, through any handle."""
        node = self._handles.node_of(ino, fh)
        if not node.dirty or node.gone:
            return None
        return Blocking(partial(self._uploads.flush, node))

    def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> Reply[None]:
        """mode 0, KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE; FSError(EOPNOTSUPP) otherwise."""
        keep_size, punch, zero = mode & 1, mode & 2, mode & 16
        if mode & ~(1 | 2 | 16) or (punch and not keep_size):
            raise FSError(errno.EOPNOTSUPP)
        if not keep_size:
            refuse_beyond(offset + length)
        node = self._handles.node_of(ino, fh)
        change = partial(self._fallocate, node, offset, length, bool(punch or zero), bool(keep_size))
        return self._handles.after_asking(node, change) if node.unknown else Blocking(change)

    def _fallocate(self, node: Node, offset: int, length: int, zero: bool, keep_size: bool) -> None:
        with node.lock:
            staged = self._uploads.stage(node)
            if zero:
                self._uploads.fill(staged, staged.missing_for_write(offset, length))
                staged.zero(offset, length)
                self._core.passthrough.zero(node.ino, offset, length)
            if not keep_size and offset + length > staged.size:
                staged.truncate(offset + length)
                self._core.passthrough.truncate(node.ino, staged.size)
            self.modified(node)
