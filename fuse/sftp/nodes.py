"""The nodes that the kernel knows: an inode number for each name, because SFTP has paths and no inode numbers.

A tree of names, so that a renamed directory takes along what is below it. It outlives the server process in a log
(state.nodelog). Not locked: the file system's lock covers it.
"""

from __future__ import annotations

import errno
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..ops import ROOT_INO, FSError, Held, Ino
from ..state.nodelog import NodeLog, NodeRecord

LOG_SLACK = 10_000
HIDING, HIDDEN = "hiding", "hidden"
"""In the log: of a file that is removed while it is open, and has another name until its last close. HIDING is written
before the server is asked, so that the other name is found whatever dies."""
PREFIX = b".sftp"
"""Of such names."""


class Node:
    """One name. parent None: the root, or gone. opens: how many there are. hidden: '', HIDING or HIDDEN.

    seen: (mtime, size) as last told by the server; None when it is not known, as after a write of our own.
    """

    __slots__ = ("children", "hidden", "ino", "kind", "name", "nlookup", "opens", "parent", "seen")

    def __init__(self, ino: Ino, parent: Node | None, name: bytes, kind: int) -> None:
        self.ino = ino
        self.parent = parent
        self.name = name
        self.kind = kind
        self.children: dict[bytes, Node] = {}
        self.nlookup = 0
        self.opens = 0
        self.hidden = ""
        self.seen: tuple[int, int] | None = None


class Nodes:
    """limit: how many there may be before the kernel is asked to give some up. top: path of the mounted directory.

    state: the directory of the log.
    """

    def __init__(self, state: Path, limit: int, top: bytes) -> None:
        self.by_ino: dict[int, Node] = {}
        self._top = top
        self._log = NodeLog(state / "nodes.log")
        self._mount = state / "mount-id"
        """Random: other names of two mounts must not be the same."""
        self._limit = limit
        self._dropped: list[int] = []
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

    def get(self, ino: int) -> Node:
        """Errors: ESTALE for one that is not known."""
        node = self.by_ino.get(ino)
        if node is None:
            raise FSError(errno.ESTALE)
        return node

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
        if new:
            try:
                self._write(new)
            except OSError:
                for node in new:
                    self._remove(node)
                raise
        for node in nodes:
            node.nlookup += 1
        return nodes

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

    def forget(self, ino: int, nlookup: int) -> None:
        """The kernel has given up so many lookups. It is written down with the next node."""
        node = self.by_ino.get(ino)
        if node is not None:
            node.nlookup -= nlookup
            self.let_go(node)

    def let_go(self, node: Node | None) -> None:
        """Drop a node that nothing needs any more, and then its directories."""
        while node is not None and node.ino != ROOT_INO and node.nlookup <= 0 and not node.opens and not node.children:
            parent = node.parent
            self._remove(node)
            self._dropped.append(node.ino)
            node = parent

    def surplus(self) -> Sequence[Held]:
        """Nodes to ask the kernel for, the oldest that nobody has open, when there are more than the limit."""
        return list(self._oldest(len(self.by_ino) - self._limit)) if len(self.by_ino) > self._limit else ()

    def _oldest(self, count: int) -> Iterator[Held]:
        for node in list(self.by_ino.values())[: 2 * count]:
            if not node.opens and node.kind != stat.S_IFDIR:
                yield Held(node.ino, ROOT_INO, b"")

    def _write(self, nodes: list[Node]) -> None:
        self._log.append([_record(node) for node in nodes], self._dropped)
        self._dropped = []
        if self._log.records > 2 * len(self.by_ino) + LOG_SLACK:
            self._log.rewrite([_record(node) for node in self.by_ino.values() if node.parent is not None])

    def _remove(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.children.pop(node.name, None)
            node.parent = None
        self.by_ino.pop(node.ino, None)


def _record(node: Node) -> NodeRecord:
    parent = node.parent.ino if node.parent is not None else ROOT_INO
    return NodeRecord(node.ino, parent, node.kind, node.hidden, node.name)
