"""The table of open files, shared by what opens, reads and writes them."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter, OrderedDict

from ...data.reader import ReadStream
from ...ops import Fh, FSError, Ino
from ..lookup.resolver import Resolver
from ..tree.core import Core
from ..tree.nodes import Node

_UNOPENED_MAX = 1024
"""Files read at once without an open: beyond, reading ahead begins anew."""


class Handle:
    """One open of a file."""

    __slots__ = ("flags", "kept", "node", "stream", "writable")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.kept = node.pages_valid
        """The kernel had its pages when it was opened."""
        self.stream: ReadStream | None = None
        self.writable = flags & os.O_ACCMODE != os.O_RDONLY


class Handles:
    """All open files of a mount."""

    def __init__(self, core: Core, resolver: Resolver) -> None:
        self._core = core
        self._resolver = resolver
        self._by_fh: dict[int, Handle] = {}
        # Not one that an earlier server gave out: the kernel may still send it, and it is another file's.
        self._next_fh = time.time_ns()
        self._unopened: OrderedDict[int, None] = OrderedDict()
        """Inodes that are read without having been opened here; the inode is the handle. Least recently read first."""

    def add(self, node: Node, flags: int) -> Fh:
        """A new handle."""
        fh = Fh(self._next_fh)
        self._next_fh += 1
        self.restore(fh, node, flags)
        self._core.opens.add(fh, node.ino, flags, node.etag, node.size)
        return fh

    def restore(self, fh: int, node: Node, flags: int) -> None:
        """A handle that is open, of this server or an earlier one."""
        self._by_fh[fh] = handle = Handle(node, flags)
        node.handles += 1
        node.writers += handle.writable
        if fh == node.ino:
            self._unopened[node.ino] = None

    def unopened(self, ino: Ino) -> Handle | None:
        """The handle for the reads of an inode that the kernel did not open here."""
        handle = self._by_fh.get(ino)
        if handle is not None:
            self._unopened.move_to_end(ino)
        return handle

    def add_unopened(self, node: Node) -> Handle:
        """Make it; the one that was used longest ago goes."""
        self.restore(node.ino, node, os.O_RDONLY)
        self._core.opens.add(node.ino, node.ino, os.O_RDONLY, node.etag, node.size)
        if len(self._unopened) > _UNOPENED_MAX:
            oldest = self.remove(Fh(next(iter(self._unopened))))
            if oldest is not None:
                self._core.nodes.drop_unused(oldest.node)
        return self._by_fh[node.ino]

    def get(self, fh: Fh) -> Handle | None:
        """The handle, None of one that an earlier server gave out."""
        return self._by_fh.get(fh)

    def remove(self, fh: Fh) -> Handle | None:
        """Forget a handle and stop its reading ahead."""
        handle = self._by_fh.pop(fh, None)
        if handle is not None:
            self._core.opens.remove(fh)
            self._unopened.pop(fh, None)
            handle.node.handles -= 1
            handle.node.writers -= handle.writable
            if handle.stream is not None:
                handle.stream.close()
        return handle

    def opens(self) -> Counter[Ino]:
        """How often each inode is open."""
        return Counter(handle.node.ino for handle in self._by_fh.values())

    def node_of(self, ino: Ino, fh: Fh) -> Node:
        """The node of a handle, or of the inode when the handle is not one of ours. FSError(ESTALE)."""
        handle = self._by_fh.get(fh)
        return handle.node if handle is not None else self._resolver.node(ino)

    async def confirm(self, node: Node) -> None:
        """Of a node of an earlier server the store must tell the version first (S-41). FSError(ESTALE)."""
        if await self._resolver.revalidate(node):
            await self._resolver.make_exact([node])
        elif not node.handles:
            raise FSError(errno.ESTALE)
