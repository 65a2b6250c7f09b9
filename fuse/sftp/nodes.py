"""The nodes that the kernel knows: an inode number for each name, because SFTP has paths and no inode numbers.

A tree of names, so that a renamed directory takes along what is below it.
"""

from __future__ import annotations

import errno
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from ..fileserver import KnownNode, KnownNodes
from ..ops import ROOT_INO, FSError, Ino
from ..state.nodelog import NodeLog, NodeRecord

HIDING, HIDDEN = "hiding", "hidden"
"""In the log: of a file that is removed while it is open, and has another name until its last close. HIDING is written
before the server is asked, so that the other name is found whatever dies."""
PREFIX = b".sftp"
"""Of such names."""


class Node(KnownNode):
    """One name. parent None: the root, or gone. hidden: '', HIDING or HIDDEN.

    seen: (mtime, size) as last told by the server; None when it is not known, as after a write of our own.
    """

    __slots__ = ("children", "hidden", "name", "parent", "seen")

    def __init__(self, ino: Ino, parent: Node | None, name: bytes, kind: int) -> None:
        super().__init__(ino, kind)
        self.parent = parent
        self.name = name
        self.children: dict[bytes, Node] = {}
        self.hidden = ""
        self.seen: tuple[int, int] | None = None


class Nodes(KnownNodes[Node]):
    """See KnownNodes. top: path of the mounted directory. state: the directory of the log."""

    def __init__(self, state: Path, limit: int, top: bytes) -> None:
        super().__init__(NodeLog(state / "nodes.log"), limit)
        self._top = top
        self._mount = state / "mount-id"
        """Random: other names of two mounts must not be the same."""
        self._next = ROOT_INO + 1

    def begin(self) -> list[bytes]:
        """A fresh mount, whose kernel knows the root only; the paths of hidden files that an earlier one left."""
        self.resume()
        left = [self.hidden_path(node) for node in self.by_ino.values() if node.hidden and node.parent]
        self._mount.write_text(secrets.token_hex(4))
        self.by_ino = {ROOT_INO: Node(ROOT_INO, None, b"", stat.S_IFDIR)}
        self._log.rewrite([])
        return left

    def resume(self) -> None:
        """What the kernel may know from a server that died."""
        self.by_ino = {ROOT_INO: Node(ROOT_INO, None, b"", stat.S_IFDIR)}
        records = self._log.load()
        for record in records.values():
            node = self.by_ino[record.ino] = Node(Ino(record.ino), None, record.name, record.kind)
            node.nlookup, node.hidden = 1, record.tail
        for record in records.values():
            node = self.by_ino[record.ino]
            node.parent = self.by_ino.get(record.parent)
            if node.parent is not None:
                node.parent.children[node.name] = node
        # Above all numbers that were given out, those included that the log has forgotten and the kernel has not.
        self._next = time.time_ns()

    def path(self, node: Node, name: bytes | None = None) -> bytes:
        """On the server; with name, of that name in this directory. Errors: ESTALE for a node without a name."""
        parts = [] if name is None else [name]
        while node.ino != ROOT_INO:
            if node.parent is None:
                raise FSError(errno.ESTALE)
            parts.append(node.name)
            node = node.parent
        return b"/".join((self._top.rstrip(b"/"), *reversed(parts))) or b"/"

    def hidden_name(self, node: Node) -> bytes:
        """The other name of a file that is removed while it is open."""
        return PREFIX + self._mount.read_bytes() + b"%016x" % node.ino

    def hidden_path(self, node: Node) -> bytes:
        """Where such a file is, or will be."""
        return self.path(node.parent or node, self.hidden_name(node))

    def hide(self, node: Node) -> None:
        """It is about to get its other name."""
        node.hidden = HIDING
        self._write([node])

    def look_up(self, directory: Node, found: Iterable[tuple[bytes, int]]) -> list[Node]:
        """The nodes of (name, type) that the kernel is told, each with one lookup more; written down before that."""
        nodes, new = [], []
        for name, kind in found:
            node = directory.children.get(name)
            if node is not None and node.kind != kind:  # another client put something else there
                self.detach(node)
                node = None
            if node is None:
                node = directory.children[name] = Node(Ino(self._next), directory, name, kind)
                self.by_ino[node.ino] = node
                self._next += 1
                new.append(node)
            nodes.append(node)
        return self._told(nodes, new)

    def detach(self, node: Node) -> None:
        """Its name is no more; the number lives as long as the kernel has it."""
        if node.parent is not None:
            node.parent.children.pop(node.name, None)
            node.parent = None
            self._dropped.append(node.ino)

    def move(self, node: Node, directory: Node, name: bytes, hidden: str = "") -> None:
        """It has this name from now on, in place of what had it."""
        if (replaced := directory.children.get(name)) not in (None, node):
            self.detach(replaced)
        if node.parent is not None:
            node.parent.children.pop(node.name, None)
        node.parent, node.name, node.hidden = directory, name, hidden
        directory.children[name] = node
        self._write([node])

    def let_go(self, node: Node | None) -> None:
        """See KnownNodes; then its directories."""
        while node is not None and node.ino != ROOT_INO and node.nlookup <= 0 and not node.opens and not node.children:
            parent = node.parent
            self._remove(node)
            self._dropped.append(node.ino)
            node = parent

    def _remove(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.children.pop(node.name, None)
            node.parent = None
        self.by_ino.pop(node.ino, None)

    def _records(self, nodes: Iterable[Node]) -> list[NodeRecord]:
        """Of the root, and of what is gone, nothing."""
        return [
            NodeRecord(node.ino, node.parent.ino, node.kind, node.hidden, node.name)
            for node in nodes
            if node.parent is not None
        ]
