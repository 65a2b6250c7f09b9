"""The nodes that the kernel knows: an inode number for each file handle, and back.

Inode numbers are the server's own (its fileid) as far as they are free, so that hard links have one number and a number
is the same on all mounts.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

from ..fileserver import KnownNode, KnownNodes
from ..ops import ROOT_INO, Ino
from ..state.nodelog import NodeLog, NodeRecord
from .calls import Attributes
from .uncommitted import Uncommitted

FIRST_OTHER = 1 << 62
"""Inode numbers from here on are those that we choose."""
Version = tuple[int, int, int]
"""mtime, ctime, size: what tells one content of a file from another, as far as version 3 can."""


class Node(KnownNode):
    """One object of the server.

    pages: the version that the kernel's pages are of; None when it has none, or they are not known to be right.
    hidden: (handle of the directory, name) under which it is kept after its removal.
    """

    __slots__ = ("handle", "hidden", "pages", "uncommitted")

    def __init__(self, ino: Ino, handle: bytes, kind: int) -> None:
        super().__init__(ino, kind)
        self.handle = handle
        self.pages: Version | None = None
        self.hidden: tuple[bytes, bytes] | None = None
        self.uncommitted: Uncommitted | None = None


def version(attributes: Attributes) -> Version:
    """Of the content that a file has with these attributes."""
    return attributes.mtime_ns, attributes.ctime_ns, attributes.size


class Nodes(KnownNodes[Node]):
    """See KnownNodes."""

    def __init__(self, log: NodeLog, limit: int) -> None:
        super().__init__(log, limit)
        self._by_handle: dict[bytes, Node] = {}

    def begin(self, root: bytes) -> None:
        """A fresh mount, whose kernel knows the root only."""
        self._log.rewrite(self._records([self._insert(Node(ROOT_INO, root, stat.S_IFDIR))]))

    def resume(self) -> None:
        """What the kernel may know from a server that died."""
        for record in self._log.load().values():
            self._insert(Node(Ino(record.ino), record.name, record.kind)).nlookup = 1

    def root(self) -> Node:
        """The directory that is mounted."""
        return self.by_ino[ROOT_INO]

    def move_root(self, handle: bytes) -> None:
        """The export has another handle since the server started again."""
        root = self.root()
        del self._by_handle[root.handle]
        root.handle = handle
        self._by_handle[handle] = root
        self._write([root])

    def of(self, handle: bytes) -> Node | None:
        """The node of a handle, if the kernel has it."""
        return self._by_handle.get(handle)

    def look_up(self, found: Iterable[tuple[bytes, Attributes]]) -> list[Node]:
        """The nodes of what the kernel is told, each with one lookup more; written down before that."""
        nodes, new = [], []
        for handle, attributes in found:
            node = self._by_handle.get(handle)
            if node is None:
                ino = self._free(attributes.fileid)
                node = self._insert(Node(ino, handle, stat.S_IFMT(attributes.mode)))
                new.append(node)
            nodes.append(node)
        return self._told(nodes, new)

    def let_go(self, node: Node) -> None:
        """See KnownNodes."""
        if node.nlookup <= 0 and node.ino != ROOT_INO:
            self._remove(node)
            self._dropped.append(node.ino)

    def _free(self, fileid: int) -> Ino:
        ino = fileid
        while ino in self.by_ino or ino == ROOT_INO or not 0 < ino < 1 << 63:
            ino = FIRST_OTHER | (ino * 6364136223846793005 + 1442695040888963407) % FIRST_OTHER
        return Ino(ino)

    def _insert(self, node: Node) -> Node:
        self.by_ino[node.ino] = node
        self._by_handle[node.handle] = node
        return node

    def _remove(self, node: Node) -> None:
        del self.by_ino[node.ino]
        del self._by_handle[node.handle]

    def _records(self, nodes: Iterable[Node]) -> list[NodeRecord]:
        return [NodeRecord(node.ino, ROOT_INO, node.kind, "", node.handle) for node in nodes]
