"""The nodes that the kernel knows: an inode number for each file handle, and back.

Inode numbers are the server's own (its fileid) as far as they are free, so that hard links have one number and a number
is the same on all mounts. The table outlives the server process in a log (state.nodelog). Not locked: the file
system's lock covers it.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Iterator, Sequence

from ..ops import ROOT_INO, FSError, Held, Ino
from ..state.nodelog import NodeLog, NodeRecord
from .calls import Attributes
from .uncommitted import Uncommitted

LOG_SLACK = 10_000
FIRST_OTHER = 1 << 62
"""Inode numbers from here on are those that we choose."""
Version = tuple[int, int, int]
"""mtime, ctime, size: what tells one content of a file from another, as far as version 3 can."""


class Node:
    """One object of the server.

    pages: the version that the kernel's pages are of; None when it has none, or they are not known to be right.
    opens: how many opens there are. hidden: (handle of the directory, name) under which it is kept after its removal.
    """

    __slots__ = ("handle", "hidden", "ino", "kind", "nlookup", "opens", "pages", "uncommitted")

    def __init__(self, ino: Ino, handle: bytes, kind: int) -> None:
        self.ino = ino
        self.handle = handle
        self.kind = kind
        self.nlookup = 0
        self.opens = 0
        self.pages: Version | None = None
        self.hidden: tuple[bytes, bytes] | None = None
        self.uncommitted: Uncommitted | None = None


def version(attributes: Attributes) -> Version:
    """Of the content that a file has with these attributes."""
    return attributes.mtime_ns, attributes.ctime_ns, attributes.size


class Nodes:
    """limit: how many there may be before the kernel is asked to give some up."""

    def __init__(self, log: NodeLog, limit: int) -> None:
        self.by_ino: dict[int, Node] = {}
        self._by_handle: dict[bytes, Node] = {}
        self._log = log
        self._limit = limit
        self._dropped: list[int] = []

    def begin(self, root: bytes) -> None:
        """A fresh mount, whose kernel knows the root only."""
        self._log.rewrite([])
        self._insert(Node(ROOT_INO, root, stat.S_IFDIR)).nlookup = 1
        self._log.append([_record(self.by_ino[ROOT_INO])])

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
        self._log.append([_record(root)])

    def get(self, ino: int) -> Node:
        """Errors: ESTALE for one that is not known."""
        node = self.by_ino.get(ino)
        if node is None:
            raise FSError(errno.ESTALE)
        return node

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
        if new:
            try:
                self._log.append([_record(node) for node in new], self._dropped)
            except OSError:
                for node in new:
                    self._remove(node)
                raise
            self._dropped = []
            if self._log.records > 2 * len(self.by_ino) + LOG_SLACK:
                self._log.rewrite([_record(node) for node in self.by_ino.values()])
        for node in nodes:
            node.nlookup += 1
        return nodes

    def forget(self, ino: int, nlookup: int) -> None:
        """The kernel has given up so many lookups. It is written down with the next node."""
        node = self.by_ino.get(ino)
        if node is None or node.ino == ROOT_INO:
            return
        node.nlookup -= nlookup
        if node.nlookup <= 0:
            self._remove(node)
            self._dropped.append(ino)

    def surplus(self) -> Sequence[Held]:
        """Nodes to ask the kernel for, the oldest that nobody has open, when there are more than the limit."""
        return list(self._oldest(len(self.by_ino) - self._limit)) if len(self.by_ino) > self._limit else ()

    def _oldest(self, count: int) -> Iterator[Held]:
        for node in list(self.by_ino.values())[: 2 * count]:
            if not node.opens and node.kind != stat.S_IFDIR:
                yield Held(node.ino, ROOT_INO, b"")

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


def _record(node: Node) -> NodeRecord:
    return NodeRecord(node.ino, ROOT_INO, node.kind, "", node.handle)
