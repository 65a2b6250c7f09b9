"""The table of open files, and how a new server takes over from one that died under a live mount (S-41, S-58, S-59).

Nodes, files that were removed while open, and open files with the version that each is on are restored from the state
directory, in this order, before the first request is answered.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import OrderedDict, defaultdict
from itertools import count

from ...data.reader import ReadStream
from ...data.staging import StagedFile
from ...ops import Caller, Fh, FSError, Ino
from ...state.nodelog import NodeRecord
from ...state.removed import Removed
from ...store.base import ETag
from ..lookup.resolver import Resolver
from ..tree import facts
from ..tree.attrs import from_metadata, to_metadata
from ..tree.core import Core
from ..tree.listing import Listed
from ..tree.nodes import Directory, Node

_UNOPENED_MAX = 1024
"""The most handles for files that the kernel reads without an open; the oldest one goes, with its readahead."""
SENT_BACK = 1 << 63
"""Set in keys of the table of open files that are not handles but thread ids of repeated opens (files.Chases)."""


class Handle:
    """One open of a file."""

    __slots__ = ("flags", "kept", "node", "stream", "writable")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.kept = node.pages_valid
        """Whether the kernel had pages of the file at the open."""
        self.stream: ReadStream | None = None
        self.writable = flags & os.O_ACCMODE != os.O_RDONLY


class Handles:
    """All open files of a mount."""

    def __init__(self, core: Core, resolver: Resolver) -> None:
        self._core = core
        self._resolver = resolver
        self._by_fh: OrderedDict[int, Handle] = OrderedDict()
        """By handle, or by inode where the kernel opens files by itself (S-51): then the least recently read first."""
        # No handle of an earlier server may come again: the kernel may still send it for another file.
        self._numbers = count(time.time_ns())

    def add(self, node: Node, flags: int, caller: Caller) -> Fh:
        """Make a new handle, which is recorded in the table on disk (OpenTable), too."""
        fh = Fh(caller.request or next(self._numbers))
        self.remove(fh)  # an earlier server made it for this very open, and died before it answered
        self.restore(fh, node, flags)
        self._core.opens.add(fh, node.ino, flags, node.etag, node.size)
        return fh

    def restore(self, fh: int, node: Node, flags: int) -> None:
        """Enter a handle that this server or an earlier one gave out."""
        self._by_fh[fh] = handle = Handle(node, flags)
        node.handles += 1
        node.writers += handle.writable

    def resume(self) -> None:
        """Take over what was open at a server that died: each file with its version, a removed one with its bytes."""
        core = self._core
        held = [opened for opened in core.opens.load() if not opened.fh & SENT_BACK]
        open_inos = {opened.ino for opened in held}
        unsent = {row.staging for row in core.db.unsent()}
        for row in core.removed.load():
            # With unsent bytes in the journal the removal was not done: the file keeps its name until that is repeated.
            if row.staging in unsent or row.ino not in open_inos or not _restore_removed(core, row):
                core.removed.forget(row.ino)
        for opened in held:
            node = core.nodes.by_ino.get(opened.ino)
            if node is None or isinstance(node, Directory) or node.replaced_before:
                core.opens.remove(opened.fh)
                continue
            self.restore(opened.fh, node, opened.flags)
            if opened.tag and not node.gone:
                facts.held(node, opened.size, ETag(opened.tag))
                node.pages_valid = True

    def unopened(self, ino: Ino) -> Handle | None:
        """Return the handle for an inode that the kernel reads without an open, or None."""
        handle = self._by_fh.get(ino)
        if handle is not None:
            self._by_fh.move_to_end(ino)
        return handle

    def add_unopened(self, node: Node) -> Handle:
        """Make the handle for an inode that the kernel reads without an open; beyond the limit, drop the oldest."""
        self.restore(node.ino, node, os.O_RDONLY)
        self._core.opens.add(node.ino, node.ino, os.O_RDONLY, node.etag, node.size)
        if len(self._by_fh) > _UNOPENED_MAX:
            oldest = self.remove(Fh(next(iter(self._by_fh))))
            if oldest is not None:
                self._core.nodes.drop_unused(oldest.node)
        return self._by_fh[node.ino]

    def get(self, fh: Fh) -> Handle | None:
        """Return a handle, or None if it is not in the table."""
        return self._by_fh.get(fh)

    def remove(self, fh: Fh) -> Handle | None:
        """Remove a handle, also from the table on disk, and end its readahead; return it."""
        handle = self._by_fh.pop(fh, None)
        if handle is not None:
            self._core.opens.remove(fh)
            handle.node.handles -= 1
            handle.node.writers -= handle.writable
            if handle.stream is not None:
                handle.stream.close()
        return handle

    def node_of(self, ino: Ino, fh: Fh) -> Node:
        """Return the node of a handle, or of the inode if the handle is not in the table. Errors: FSError(ESTALE)."""
        handle = self._by_fh.get(fh)
        return handle.node if handle is not None else self._resolver.node(ino)

    async def confirm(self, node: Node) -> None:
        """Ask the store for the version of an earlier server's node (S-41). Errors: FSError(ESTALE) when it is gone."""
        if await self._resolver.revalidate(node):
            await self._resolver.make_exact([node])
        elif not node.handles:
            raise FSError(errno.ESTALE)


def restore_nodes(core: Core) -> None:
    """Restore the nodes that the kernel may still ask for; the store is asked about each when it is used.

    A directory comes before its entries, and these come in the order of the log: of two nodes with one name, the one
    that was logged last has it. The kernel has at least one reference to each.
    """
    entries: defaultdict[int, list[NodeRecord]] = defaultdict(list)
    for record in core.nodelog.load().values():
        entries[record.parent].append(record)
    directories = [core.nodes.root]
    while directories:
        parent = directories.pop()
        for record in entries.pop(parent.ino, ()):
            attributes = core.settings.defaults.of(record.kind, core.clock.time_ns())
            listed = Listed(record.kind, record.tail)
            node = core.nodes.add(parent, record.name, listed, attributes, Ino(record.ino))
            node.nlookup, node.pinned = 1, True
            if isinstance(node, Directory):
                directories.append(node)


def _restore_removed(core: Core, row: Removed) -> bool:
    """Restore a file that was removed while open; return False when its bytes are not there."""
    if not row.hidden_key and not core.removed.content(row.ino).exists():
        return False
    node = core.nodes.by_ino.get(Ino(row.ino))
    parent = core.nodes.by_ino.get(row.parent, core.nodes.root)
    assert isinstance(parent, Directory)
    defaults = core.settings.defaults.of(stat.S_IFREG, core.clock.time_ns())
    if node is None:
        node = Node(Ino(row.ino), parent, os.fsencode(row.name), Listed(stat.S_IFREG, row.tail), defaults)
        node.nlookup = 1
        core.nodes.by_ino[node.ino] = node
    node.unlinked_key, size = row.hidden_key, row.size
    if not row.hidden_key:
        node.staged = StagedFile.recovered(core.removed.content(row.ino), None, 0, core.clock.time_ns())
        node.staged.dirty = False
        core.nodes.staged.add(node)
        size = node.staged.size
    facts.held(node, size, ETag(row.etag), from_metadata(row.metadata, stat.S_IFREG, defaults))
    if parent.children.get(node.name) is node:
        del parent.children[node.name]
    node.gone = True
    return True


def record_removed(core: Core, node: Node) -> None:
    """Record, before the object is removed, what a new server would need for the open handles. node.lock is held."""
    if node.parent is None:
        return
    row = Removed(
        ino=node.ino,
        parent=node.parent.ino,
        name=os.fsdecode(node.name),
        tail=node.tail,
        hidden_key=node.unlinked_key,
        staging=node.staged.name if node.staged is not None else "",
        etag=node.etag,
        size=node.size,
        metadata=to_metadata(node.attributes),
    )
    core.removed.record(row, node.staged.path if node.staged is not None else None)
