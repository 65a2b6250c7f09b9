"""Open files: reading versions, writing staging files, and what open and close promise (S-17 to S-24)."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from datastore.errors import DatastoreError, NotFound, PreconditionFailed

from ..data.reader import ReadStream
from ..ops import Blocking, Fh, FSError, Ino, OpenReply, OpenRequest, Reply, resolve
from .attrs import without_suidgid
from .core import Core
from .foresight import Foresight
from .nodes import Directory, Node
from .remote import Remote
from .resolver import Resolver
from .uploads import Uploads

Bytes = bytes | bytearray | memoryview
R = TypeVar("R")
_TARGETS = 10_000
"""Link targets kept in memory: at most 40 MB, usually one."""


class Handle:
    """One open of a file."""

    __slots__ = ("flags", "node", "stamp", "stream")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.stream: ReadStream | None = None
        self.stamp: tuple[str, str] = ("", "")

    @property
    def writable(self) -> bool:
        """Opened for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class Files:
    """All open files of a mount."""

    def __init__(self, core: Core, remote: Remote, resolver: Resolver, uploads: Uploads, foresight: Foresight) -> None:
        self._core = core
        self._foresight = foresight
        self._remote = remote
        self._resolver = resolver
        self._uploads = uploads
        self._handles: dict[int, Handle] = {}
        self._next_fh = 1
        self._targets: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    # -- open and close

    def open(self, ino: Ino, request: OpenRequest) -> Reply[OpenReply]:
        """open(2) without O_CREAT. FSError(ESTALE) sends the kernel to look the name up again."""
        with self._core.lock:
            node = self._resolver.node(ino)
            # The upload writes the attributes too, so whoever may write must know them, also where stat does not ask.
            known = node.exact or not node.etag or request.flags & os.O_ACCMODE == os.O_RDONLY
            if not request.flags & os.O_TRUNC and known and self._resolver.current(node):
                return self.opened(node, request.flags)
        return Blocking(partial(self._open, node, request))

    def _open(self, node: Node, request: OpenRequest) -> OpenReply:
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        if not node.gone and not self._resolver.revalidate(node):
            raise FSError(errno.ESTALE)
        if request.flags & os.O_ACCMODE != os.O_RDONLY and node.etag:
            self._resolver.make_exact([node])
        if request.flags & os.O_TRUNC:
            with node.lock:
                self.truncate(node, 0)
                if request.kill_suidgid:
                    self.drop_suidgid(node)
        with self._core.lock:
            return self.opened(node, request.flags)

    def opened(self, node: Node, flags: int) -> OpenReply:
        """A handle for a node. The state lock is held."""
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        fh = Fh(self._next_fh)
        self._next_fh += 1
        self._handles[fh] = Handle(node, flags)
        node.handles += 1
        keep, node.pages_valid = node.pages_valid, True
        if flags & os.O_ACCMODE == os.O_RDONLY and node.parent is not None and node.etag:
            self._foresight.opened(node.parent, node.name)
        return OpenReply(fh, keep_cache=keep)

    def release(self, ino: Ino, fh: Fh) -> Reply[None]:
        """The last close of a handle."""
        with self._core.lock:
            handle = self._handles.pop(fh, None)
            node = handle.node if handle is not None else self._core.nodes.by_ino.get(ino)
            if node is None:
                return None
            if handle is not None:
                node.handles -= 1
                if handle.stream is not None:
                    handle.stream.close()
            if node.handles == 0 and (node.staged is not None or node.unlinked_key):
                return Blocking(partial(self._finish, node))
            self._core.nodes.drop_unused(node)
        return None

    def _finish(self, node: Node) -> None:
        """Nobody has the file open any more: send what mmap wrote late, keep what cannot be sent, drop the rest."""
        with self._core.tree.shared(), node.lock:
            if node.handles:
                return
            if node.gone:
                self._uploads.discard(node)
                if node.unlinked_key:
                    self._discard_copy(node.unlinked_key)
            else:
                if node.dirty and node.staged is not None and node.staged.error:
                    # The close failed and said so. It is tried again later: now all who read the file would wait.
                    return
                try:
                    self._uploads.send(node)
                except (DatastoreError, OSError):
                    # Recorded and tried again later; nobody hears the answer to a release.
                    return
                self._uploads.settle(node)
        with self._core.lock:
            self._core.nodes.drop_unused(node)

    def _discard_copy(self, key: str) -> None:
        """Remove the hidden copy of a file that was removed while open."""
        self._core.store.delete(key)
        for intent in self._core.db.intents():
            if intent.source == key:
                self._core.db.end(intent.id)

    def writers(self, node: Node) -> bool:
        """Whether a handle that can write is open: its close will send the changes."""
        with self._core.lock:
            return node.handles > 0 and any(h.writable for h in self._handles.values() if h.node is node)

    def node_of(self, ino: Ino, fh: Fh) -> Node:
        """The node of a handle, or of the inode when the handle is not one of ours. FSError(ESTALE)."""
        handle = self._handles.get(fh)
        return handle.node if handle is not None else self._resolver.node(ino)

    def _after_asking(self, node: Node, call: Callable[[], Reply[R]]) -> Blocking[R]:
        """Of a node of an earlier server the store must tell the version first (S-41). FSError(ESTALE)."""

        def ask() -> R:
            if not self._resolver.revalidate(node):
                raise FSError(errno.ESTALE)
            self._resolver.make_exact([node])
            return resolve(call())

        return Blocking(ask)

    # -- reading

    def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> Reply[Bytes]:
        """Bytes of the version that the handle is on."""
        handle = self._handles.get(fh) or Handle(self._resolver.node(ino), os.O_RDONLY)
        node = handle.node
        if node.unknown:
            return self._after_asking(node, lambda: self.read(ino, fh, offset, size))
        if node.staged is not None:
            return self._read_staged(node, offset, size)
        got = self._stream(handle).read(offset, size)
        if isinstance(got, Blocking):
            return Blocking(partial(self._read_waiting, handle, got, offset, size), interruptible=True)
        return got

    def _read_staged(self, node: Node, offset: int, size: int) -> Reply[Bytes]:
        staged = node.staged
        body = staged.read_present(offset, size) if staged is not None else None
        if body is not None:
            return body
        return Blocking(partial(self._read_filling, node, offset, size))

    def _read_filling(self, node: Node, offset: int, size: int) -> Bytes:
        with node.lock:
            staged = node.staged
            if staged is None:
                return self._core.reader.fetch(node.version(), offset, size)
            self._uploads.fill(staged, staged.missing(offset, min(offset + size, staged.size)))
            return staged.read(offset, size)

    def _stream(self, handle: Handle) -> ReadStream:
        node = handle.node
        version = node.version()
        stamp = (version.key, version.etag)
        if handle.stream is None or handle.stamp != stamp:
            if handle.stream is not None:
                handle.stream.close()
            handle.stream, handle.stamp = self._core.reader.open(version), stamp
        return handle.stream

    def _read_waiting(self, handle: Handle, got: Blocking[bytes | memoryview], offset: int, size: int) -> Bytes:
        try:
            return got.fn()
        except (PreconditionFailed, NotFound):
            return self._read_superseded(handle, offset, size)

    def _read_superseded(self, handle: Handle, offset: int, size: int) -> Bytes:
        """The version that we read is not in the store any more: go on with what grew from it, else ESTALE (S-30)."""
        node = handle.node
        if node.gone or not self._remote.head(node):
            raise FSError(errno.ESTALE)
        try:
            return self._core.reader.fetch(node.version(), offset, size)
        except (PreconditionFailed, NotFound) as error:
            raise FSError(errno.ESTALE) from error

    def readlink(self, ino: Ino) -> Reply[bytes]:
        """The target of a link; FSError(EINVAL) of anything else."""
        with self._core.lock:
            node = self._resolver.node(ino)
            if not stat.S_ISLNK(node.attributes.mode):
                raise FSError(errno.EINVAL)
            if node.attributes.target is not None:
                return node.attributes.target
            target = self._targets.get((node.key, node.etag))
        return target if target is not None else Blocking(partial(self._readlink, node))

    def _readlink(self, node: Node) -> bytes:
        try:
            body, info = self._core.store.get(node.key)
        except NotFound as error:
            raise FSError(errno.ESTALE) from error
        target = bytes(body)
        with self._core.lock:
            self._targets[info.key, info.etag] = target
            if len(self._targets) > _TARGETS:
                self._targets.popitem(last=False)
        return target

    # -- writing

    def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> Reply[int]:
        """Into the staging file; at once unless the node is busy or part of a block must be fetched."""
        node = self.node_of(ino, fh)
        if not payload:
            return 0
        if node.unknown:
            return self._after_asking(node, lambda: self.write(ino, fh, offset, payload, kill_suidgid))
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
        self.modified(node)
        if kill_suidgid:
            self.drop_suidgid(node)
        return written

    def modified(self, node: Node) -> None:
        """The staged content changed: size and times follow. node.lock is held."""
        staged = node.staged
        assert staged is not None
        now = self._core.now_ns()
        staged.written_at = self._core.clock.monotonic()
        with self._core.lock:
            node.size = staged.size
            node.attributes = node.attributes._replace(mtime_ns=now, ctime_ns=now)
            if node.parent is not None and not node.gone:
                node.parent.pending.add(node.name)
        if not staged.journaled:
            self._uploads.record(node)

    def drop_suidgid(self, node: Node) -> None:
        """Clear setuid and setgid as a write by another does."""
        node.attributes = node.attributes._replace(mode=without_suidgid(node.attributes.mode))

    def truncate(self, node: Node, size: int) -> None:
        """Set the size in the staging file. node.lock is held; may fetch the last block."""
        staged = self._uploads.stage(node, empty=size == 0)
        if 0 < size < staged.size:
            self._uploads.fill(staged, staged.missing(size - size % 4096, size))
        staged.truncate(size)
        self.modified(node)
        self._uploads.record(node)

    def flush(self, ino: Ino, fh: Fh) -> Reply[None]:
        """close(2): what this handle may have written goes to the store."""
        handle = self._handles.get(fh)
        node = self.node_of(ino, fh)
        if not self._uploads.owes(node) or (handle is not None and not handle.writable):
            return None
        return Blocking(partial(self._uploads.flush, node))

    def fsync(self, ino: Ino, fh: Fh) -> Reply[None]:
        """fsync(2): the same, through any handle."""
        node = self.node_of(ino, fh)
        if not node.dirty or node.gone:
            return None
        return Blocking(partial(self._uploads.flush, node))

    def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> Reply[None]:
        """mode 0, KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE; FSError(EOPNOTSUPP) otherwise."""
        keep_size, punch, zero = mode & 1, mode & 2, mode & 16
        if mode & ~(1 | 2 | 16) or (punch and not keep_size):
            raise FSError(errno.EOPNOTSUPP)
        node = self.node_of(ino, fh)
        change = partial(self._fallocate, node, offset, length, bool(punch or zero), bool(keep_size))
        return self._after_asking(node, change) if node.unknown else Blocking(change)

    def _fallocate(self, node: Node, offset: int, length: int, zero: bool, keep_size: bool) -> None:
        with node.lock:
            staged = self._uploads.stage(node)
            if zero:
                self._uploads.fill(staged, staged.missing_for_write(offset, length))
                staged.zero(offset, length)
            if not keep_size and offset + length > staged.size:
                staged.truncate(offset + length)
            self.modified(node)

    def lseek(self, ino: Ino, fh: Fh, offset: int, whence: int) -> Reply[int]:
        """SEEK_DATA and SEEK_HOLE: a file is one piece of data (lseek(2) allows that)."""
        node = self.node_of(ino, fh)
        if node.unknown:
            return self._after_asking(node, lambda: self.lseek(ino, fh, offset, whence))
        size = node.size
        if offset >= size:
            raise FSError(errno.ENXIO)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise FSError(errno.EINVAL)
        return offset if whence == os.SEEK_DATA else size
