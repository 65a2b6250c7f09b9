"""The nodes that the kernel knows: an inode number for each name, because SFTP has paths and no inode numbers.

The nodes form a tree of names, so that the rename of a directory changes the paths of everything below it.
"""

from __future__ import annotations

import contextlib
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
"""The states, also in the log, of a file that was removed while it is open and has a hidden name until its last close.
HIDING is logged before the server is asked to rename, so that the hidden name is found after any crash."""
PREFIX = b".sftp"
"""How hidden names begin."""


class Node(KnownNode):
    """One name. parent: None for the root and for a node whose name is gone. hidden: '', HIDING or HIDDEN.

    seen: (mtime, size) as last told by the server; None if they are not known, as after a write by this mount.
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
    """See KnownNodes. state: the directory of the log. top: the path of the mounted directory on the server."""

    def __init__(self, state: Path, limit: int, top: bytes) -> None:
        super().__init__(NodeLog(state / "nodes.log"), limit)
        self._top = top
        self._mount = state / "mount-id"
        """The file of a random id, which makes the hidden names of two mounts differ. It is removed at the end of a
        mount that leaves no hidden names on the server."""
        self._next = ROOT_INO + 1

    def begin(self) -> list[bytes]:
        """Begin a fresh mount, whose kernel knows only the root; return the hidden paths that an earlier mount left."""
        self.resume()
        left = self.hidden_paths()
        self._mount.write_text(secrets.token_hex(4))
        self.by_ino = {ROOT_INO: Node(ROOT_INO, None, b"", stat.S_IFDIR)}
        self._log.rewrite([])
        return left

    def resume(self) -> None:
        """Load the nodes that the kernel may still know from a process of this mount that died."""
        if not self._mount.exists():
            self._mount.write_text(secrets.token_hex(4))
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
        # This is above all numbers given out before, also above those that the kernel still has but the log dropped.
        self._next = time.time_ns()

    def end(self) -> None:
        """Have the state directory show that no hidden names are left on the server. Idempotent."""
        for node in self.hidden():
            node.hidden = ""
        self._mount.unlink(missing_ok=True)

    def path(self, node: Node, name: bytes | None = None) -> bytes:
        """Return a node's path on the server, or that of `name` in this directory. Errors: ESTALE if a name is gone."""
        parts = [] if name is None else [name]
        while node.ino != ROOT_INO:
            if node.parent is None:
                raise FSError(errno.ESTALE)
            parts.append(node.name)
            node = node.parent
        return b"/".join((self._top.rstrip(b"/"), *reversed(parts))) or b"/"

    def hidden_name(self, node: Node) -> bytes:
        """Return the hidden name for a file that is removed while it is open."""
        return PREFIX + self._mount.read_bytes() + b"%016x" % node.ino

    def hidden_path(self, node: Node) -> bytes:
        """Return the path of the hidden name, which the file has or is about to get."""
        return self.path(node.parent or node, self.hidden_name(node))

    def hidden(self) -> list[Node]:
        """Return the removed files that have a hidden name, or may have got one."""
        return [node for node in self.by_ino.values() if node.hidden and node.parent is not None]

    def hidden_paths(self) -> list[bytes]:
        """Return the paths of their hidden names, but for those below a directory that is known to be gone."""
        paths = []
        for node in self.hidden():
            with contextlib.suppress(FSError):
                paths.append(self.hidden_path(node))
        return paths

    def hide(self, node: Node) -> None:
        """Log that a file is about to get its hidden name."""
        with self.lock:
            node.hidden = HIDING
            self._write([node])

    def look_up(self, directory: Node, found: Iterable[tuple[bytes, int]]) -> list[Node]:
        """Return the nodes of each (name, type), with one more lookup; log new nodes before the kernel is told."""
        nodes, new = [], []
        with self.lock:
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

    def detach(self, node: Node | None) -> None:
        """Take the name off a node, if it has one; its inode number lives as long as the kernel has it."""
        with self.lock:
            if node is not None and node.parent is not None:
                node.parent.children.pop(node.name, None)
                node.parent = None
                self._dropped.append(node.ino)

    def move(self, node: Node, directory: Node, name: bytes, hidden: str = "") -> None:
        """Give a node this name, and take it off the node that has it."""
        with self.lock:
            if (replaced := directory.children.get(name)) is not node:
                self.detach(replaced)
            if node.parent is not None:
                node.parent.children.pop(node.name, None)
            node.parent, node.name, node.hidden = directory, name, hidden
            directory.children[name] = node
            self._write([node])

    def let_go(self, node: Node | None) -> None:
        """See KnownNodes. The directories above that nothing needs any more are dropped too."""
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
        """See KnownNodes. The root, and nodes whose name is gone, have no record."""
        return [
            NodeRecord(node.ino, node.parent.ino, node.kind, node.hidden, node.name)
            for node in nodes
            if node.parent is not None
        ]
