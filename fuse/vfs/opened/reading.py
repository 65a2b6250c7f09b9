"""Reads open files and links: from the staging file, or the version that is open (S-17, S-30, S-147)."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from dataclasses import dataclass, field

from datastore.errors import CorruptBody, NotFound, PreconditionFailed

from ...data.reader import ReadStream
from ...ops import Fh, FSError, Ino
from ..lookup.prefetcher import Prefetcher
from ..lookup.resolver import Resolver
from ..tree.core import Core
from ..tree.growth import follow_unread
from ..tree.nodes import Node
from ..upload.uploads import Uploads
from .handles import Handle, Handles

Bytes = bytes | bytearray | memoryview
_TARGETS = 10_000
"""The most link targets that are kept in memory: up to 40 MB, usually 1 MB."""
_TRIES = 4
"""How often a read is tried, each time with the version that the store then has."""


@dataclass(eq=False, repr=False)
class Reading:
    """Implements read and readlink."""

    _core: Core
    _resolver: Resolver
    _uploads: Uploads
    _handles: Handles
    _prefetcher: Prefetcher
    _targets: OrderedDict[tuple[str, str], bytes] = field(default_factory=OrderedDict)

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> Bytes:
        """Return bytes of the version that the handle is on.

        If the store does not have it any more, return bytes of the version that grew from it (S-31) or, if nobody has
        read a byte yet, of the present version (S-147). Errors: FSError(ESTALE) when there is neither (S-30).
        """
        handle = self._handles.get(fh) or self._unopened(ino)
        node = handle.node
        if node.unknown:
            await self._handles.confirm(node)
        for _ in range(_TRIES):
            if node.staged is not None:
                node.pinned = True
                body: Bytes | None = node.staged.read_present(offset, size)
                body = body if body is not None else await self._read_filling(node, offset, size)
                if body is not None:
                    return body
            stream = self._stream(handle)
            try:
                body = await stream.read(offset, size)
                if node.etag == stream.version.etag:  # from now on handles stay on the version (S-147)
                    node.pinned = True
                    return body
            except (PreconditionFailed, NotFound):
                pass
            except CorruptBody:  # the body is wrong, or the size that the store told before was
                if node.gone or not await self._resolver.ask_now(node) or node.version() == stream.version:
                    raise
                continue
            async with node.lock:  # a removal or rename here holds it until the bytes are kept
                kept = node.staged is not None or bool(node.unlinked_key)
            lives = kept or (not node.gone and await self._resolver.ask_now(node))
            if not lives and not await follow_unread(self._core, node, stream.version):
                break
        raise FSError(errno.ESTALE)

    def _unopened(self, ino: Ino) -> Handle:
        """Return a handle for an inode that the kernel opened by itself, or that an earlier server opened."""
        if not self._core.settings.open_less:
            return Handle(self._resolver.node(ino), os.O_RDONLY)
        handle = self._handles.unopened(ino)
        if handle is None:
            node = self._resolver.node(ino)
            handle = self._handles.add_unopened(node)
            self._prefetcher.opened(node)
        return handle

    def _stream(self, handle: Handle) -> ReadStream:
        stream, version = handle.stream, handle.node.version()
        if stream is None or stream.version != version:
            if stream is not None:
                stream.close()
            elif handle.kept:  # the kernel has dropped its pages: prefetch as if the file had just been opened
                self._prefetcher.opened(handle.node)
            stream = handle.stream = self._core.reader.open(version)
        return stream

    async def _read_filling(self, node: Node, offset: int, size: int) -> bytes | None:
        """Fetch missing bytes, then read the staging file; None if the node no longer has one."""
        async with node.lock:
            staged = node.staged
            if staged is None:
                return None
            return await self._uploads.read(staged, offset, size)

    async def readlink(self, ino: Ino) -> bytes:
        """Return the target of a link. Errors: FSError(EINVAL) for any other node; ESTALE, CorruptBody."""
        node = self._resolver.node(ino)
        if not stat.S_ISLNK(node.attributes.mode):
            raise FSError(errno.EINVAL)
        target = node.attributes.target
        if target is None:
            target = self._targets.get((node.key, node.etag))
        if target is not None:
            return target
        try:
            body, info = await self._core.store.get(node.key)
        except NotFound as error:
            raise FSError(errno.ESTALE) from error
        if len(body) != info.size:
            raise CorruptBody(f"'{info.key}': {len(body)} bytes came instead of {info.size}", key=info.key)
        self.keep_target(info.key, info.etag, bytes(body))
        return bytes(body)

    def keep_target(self, key: str, etag: str, target: bytes) -> None:
        """Keep the target of this version of a link in memory."""
        self._targets[key, etag] = target
        if len(self._targets) > _TARGETS:
            self._targets.popitem(last=False)
