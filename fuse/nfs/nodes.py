"""The nodes that the kernel knows, each with an inode number and the NFS file handle that belongs to it.

The inode number is the server's own (the fileid) unless that is taken, so that all hard links of a file have the same
number, and a file has the same number on all mounts.
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
"""The lowest inode number that the mount chooses itself, when the server's fileid can't be used."""
Version = tuple[int, int, int]
"""mtime, ctime and size, which tell one content of a file from another as far as NFS version 3 can."""


class Node(KnownNode):
    """A file, directory or other object of the server.

    pages: the version of the file that the kernel's page cache has; None if it has no pages, or pages of an unknown
    version. hidden: (handle of the directory, hidden name) of a file that was removed while it is open, else None.
    """

    __slots__ = ("handle", "hidden", "pages", "uncommitted")

    def __init__(self, ino: Ino, handle: bytes, kind: int) -> None:
        super().__init__(ino, kind)
        self.handle = handle
        self.pages: Version | None = None
        self.hidden: tuple[bytes, bytes] | None = None
        self.uncommitted: Uncommitted | None = None


def version(attributes: Attributes) -> Version:
    """Return the version of a file that has these attributes."""
    return attributes.mtime_ns, attributes.ctime_ns, attributes.size


class Nodes(KnownNodes[Node]):
    """The nodes of an NFS mount; see KnownNodes."""

    def __init__(self, log: NodeLog, limit: int) -> None:
        super().__init__(log, limit)
        self._by_handle: dict[bytes, Node] = {}

    def begin(self, root: bytes) -> None:
        """Begin a fresh mount, of which the kernel knows only the root."""
        self._log.rewrite(self._records([self._insert(Node(ROOT_INO, root, stat.S_IFDIR))]))

    def resume(self) -> None:
        """Load the nodes that the kernel may still know from a process of this mount that died."""
        for record in self._log.load().values():
            self._insert(Node(Ino(record.ino), record.name, record.kind)).nlookup = 1

    def root(self) -> Node:
        """Return the node of the mounted directory."""
        return self.by_ino[ROOT_INO]

    def move_root(self, handle: bytes) -> None:
        """Give the root another file handle, which the export has since the NFS server restarted."""
        with self.lock:
            root = self.root()
            del self._by_handle[root.handle]
            root.handle = handle
            self._by_handle[handle] = root
            self._write([root])

    def of(self, handle: bytes) -> Node | None:
        """Return the node of a file handle, or None if the kernel does not know the object."""
        return self._by_handle.get(handle)

    def look_up(self, found: Iterable[tuple[bytes, Attributes]]) -> list[Node]:
        """Return the nodes of found objects, each with one more lookup; log new nodes before the kernel is told."""
        nodes, new = [], []
        with self.lock:
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
