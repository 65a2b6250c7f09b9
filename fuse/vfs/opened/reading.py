"""Reads of open files and of links: from the staging file, from the version that is open (S-17, S-30, S-147)."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from datastore.errors import CorruptBody, NotFound, PreconditionFailed

from ...data.reader import ReadStream
from ...ops import Blocking, Fh, FSError, Ino, Reply
from ...store.base import ObjectVersion
from ..lookup.prefetcher import Prefetcher
from ..lookup.remote import Remote
from ..lookup.resolver import Resolver
from ..tree.core import Core
from ..tree.growth import follow_unread
from ..tree.nodes import Node
from ..upload.uploads import Uploads
from .handles import Handle, Handles

Bytes = bytes | bytearray | memoryview
_TARGETS = 10_000
"""Link targets kept in memory: at most 40 MB, usually one."""
_SUPERSEDED_MAX = 3
"""So often is a read begun again with the version that the store says it has."""


class Reading:
    """What read, readlink and lseek answer."""

    def __init__(
        self,
        core: Core,
        remote: Remote,
        resolver: Resolver,
        uploads: Uploads,
        handles: Handles,
        prefetcher: Prefetcher,
    ) -> None:
        self._core = core
        self._prefetcher = prefetcher
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
        stream = self._stream(handle)
        got = stream.read(offset, size)
        if isinstance(got, Blocking):
            return Blocking(partial(self._read_waiting, node, stream.version, got.fn, offset, size))
        return got if self._pin(node, stream.version) else self.read(ino, fh, offset, size)

    def _pin(self, node: Node, version: ObjectVersion) -> bool:
        """Whether bytes of this version may be given out, for it is the node's; then handles stay on it (S-147)."""
        if node.pinned and node.etag == version.etag:
            return True
        with self._core.lock:
            node.pinned = node.pinned or node.etag == version.etag
            return node.etag == version.etag

    def _unopened(self, ino: Ino) -> Handle:
        """The handle of an inode that the kernel opened by itself, or that an earlier server opened."""
        if not self._core.settings.open_less:
            return Handle(self._resolver.node(ino), os.O_RDONLY)
        with self._core.lock:
            handle = self._handles.unopened(ino)
            if handle is None:
                node = self._resolver.node(ino)
                handle = self._handles.add_unopened(node)
                self._prefetcher.opened(node)
            return handle

    def _read_staged(self, node: Node, offset: int, size: int) -> Reply[Bytes]:
        node.pinned = True
        staged = node.staged
        body = staged.read_present(offset, size) if staged is not None else None
        if body is not None:
            return body
        return Blocking(partial(self._read_filling, node, offset, size))

    def _read_filling(self, node: Node, offset: int, size: int) -> Bytes:
        with node.lock:
            staged = node.staged
            if staged is None:
                version = node.version()
                fetch = partial(self._core.reader.fetch, version, offset, size)
                return self._read_waiting(node, version, fetch, offset, size)
            node.pinned = True
            self._uploads.fill(staged, staged.missing(offset, min(offset + size, staged.size)))
            return staged.read(offset, size)

    def _stream(self, handle: Handle) -> ReadStream:
        node = handle.node
        version = node.version()
        stamp = (version.key, version.etag)
        if handle.stream is None or handle.stamp != stamp:
            if handle.stream is not None:
                handle.stream.close()
            elif handle.kept:
                self._follow(node)
            handle.stream, handle.stamp = self._core.reader.open(version), stamp
        return handle.stream

    def _follow(self, node: Node) -> None:
        """The kernel let go of pages that it had: as if the file was opened only now."""
        with self._core.lock:
            self._prefetcher.opened(node)

    def _read_waiting(
        self, node: Node, version: ObjectVersion, fetch: Callable[[], Bytes], offset: int, size: int
    ) -> Bytes:
        with suppress(PreconditionFailed, NotFound):
            body = fetch()
            if self._pin(node, version):
                return body
        return self._read_superseded(node, version, offset, size)

    def _read_superseded(self, node: Node, version: ObjectVersion, offset: int, size: int) -> Bytes:
        """The version that we read is not in the store any more: go on with what grew from it (S-31), or with what is
        there if nobody has read anything (S-147), else ESTALE (S-30)."""
        for _ in range(_SUPERSEDED_MAX):
            with node.lock:  # who removes or replaces the file here has kept its bytes by the end
                kept = node.staged is not None or bool(node.unlinked_key)
            lives = kept or (not node.gone and self._resolver.ask_now(node))
            if not lives and not follow_unread(self._core, node, version):
                break
            if node.staged is not None:
                return self._read_filling(node, offset, size)
            version = node.version()
            with suppress(PreconditionFailed, NotFound):
                body = self._core.reader.fetch(version, offset, size)
                if self._pin(node, version):
                    return body
        raise FSError(errno.ESTALE)

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
