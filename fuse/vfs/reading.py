"""Reads of open files and of links: from the staging file, from the version that is open (S-17, S-30)."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from functools import partial

from datastore.errors import CorruptBody, NotFound, PreconditionFailed

from ..data.reader import ReadStream
from ..ops import Blocking, Fh, FSError, Ino, Reply
from .core import Core
from .foresight import Foresight
from .handles import Handle, Handles
from .nodes import Node
from .remote import Remote
from .resolver import Resolver
from .uploads import Uploads

Bytes = bytes | bytearray | memoryview
_TARGETS = 10_000
"""Link targets kept in memory: at most 40 MB, usually one."""


class Reading:
    """What read, readlink and lseek answer."""

    def __init__(
        self,
        core: Core,
        remote: Remote,
        resolver: Resolver,
        uploads: Uploads,
        handles: Handles,
        foresight: Foresight,
    ) -> None:
        self._core = core
        self._foresight = foresight
        self._remote = remote
        self._resolver = resolver
        self._uploads = uploads
        self._handles = handles
        self._targets: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> Reply[Bytes]:
        """Bytes of the version that the handle is on."""
        handle = self._handles.get(fh) or self._unopened(ino)
        node = handle.node
        if node.unknown:
            return self._handles.after_asking(node, lambda: self.read(ino, fh, offset, size))
        if node.staged is not None:
            return self._read_staged(node, offset, size)
        got = self._stream(handle).read(offset, size)
        if isinstance(got, Blocking):
            return Blocking(partial(self._read_waiting, handle, got, offset, size), interruptible=True)
        return got

    def _unopened(self, ino: Ino) -> Handle:
        """The handle of an inode that the kernel opened by itself, or that an earlier server opened."""
        if not self._core.settings.open_less:
            return Handle(self._resolver.node(ino), os.O_RDONLY)
        with self._core.lock:
            handle = self._handles.unopened(ino)
            if handle is None:
                node = self._resolver.node(ino)
                handle = self._handles.add_unopened(node)
                if node.parent is not None and node.etag:
                    self._foresight.opened(node.parent, node.name)
            return handle

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
        with node.lock:  # who removes or replaces the file here has kept its bytes by the end
            kept = node.staged is not None or bool(node.unlinked_key)
        if not kept and (node.gone or not self._remote.head(node)):
            raise FSError(errno.ESTALE)
        if node.staged is not None:
            return self._read_filling(node, offset, size)
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
        if len(target) != info.size:
            raise CorruptBody(f"'{node.key}': {len(target)} bytes came instead of {info.size}", key=node.key)
        self._keep_target(info.key, info.etag, target)
        return target

    def linked(self, ino: Ino, target: bytes) -> None:
        """A link was made just now: nobody has to ask where it leads."""
        node = self._resolver.node(ino)
        self._keep_target(node.key, node.etag, target)

    def _keep_target(self, key: str, etag: str, target: bytes) -> None:
        with self._core.lock:
            self._targets[key, etag] = target
            if len(self._targets) > _TARGETS:
                self._targets.popitem(last=False)

    def lseek(self, ino: Ino, fh: Fh, offset: int, whence: int) -> Reply[int]:
        """SEEK_DATA and SEEK_HOLE: a file is one piece of data (lseek(2) allows that)."""
        node = self._handles.node_of(ino, fh)
        if node.unknown:
            return self._handles.after_asking(node, lambda: self.lseek(ino, fh, offset, whence))
        size = node.size
        if offset >= size:
            raise FSError(errno.ENXIO)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise FSError(errno.EINVAL)
        return offset if whence == os.SEEK_DATA else size
