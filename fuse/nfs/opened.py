"""The table of open files, with who opened them, and the hidden names of files that are removed while they are open.

A server of NFS version 3 knows no open files: a removed file is gone for all clients. So the mount renames an open file
instead, to a hidden name (".nfs..." in its directory, as all NFS clients do), and removes that name at the last close.
The table and the log of hidden names are files that outlive this process.

Threads: the lock of the nodes covers both; no thread holds that lock while it waits for the server.
"""

from __future__ import annotations

import errno
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ..fileserver import removed
from ..ops import ROOT_INO, Caller, Fh, FSError
from ..state.nodelog import NodeLog, NodeRecord
from ..state.opens import OpenTable
from . import calls
from .calls import NFSError, Request
from .client import Client, Credentials
from .identity import as_text, from_text
from .nodes import Node, Nodes

PREFIX = b".nfs"
LOG_SLACK = 1000


class Handle(NamedTuple):
    """An open file or directory, and who opened it."""

    node: Node
    identity: Credentials
    flags: int


class OpenFiles:
    """All open files and directories of a mount."""

    def __init__(self, client: Client, nodes: Nodes, state: Path) -> None:
        self._client = client
        self._nodes = nodes
        self._lock = nodes.lock
        self._table = OpenTable(state / "opens")
        self._by_fh: dict[int, Handle] = {}
        self._fhs = count(time.time_ns())  # so that no fh of an earlier process is given out again
        self._hidden = NodeLog(state / "hidden.log")
        self._orphans: list[tuple[int, bytes, bytes]] = []
        """(inode, handle of the directory, hidden name) of files that an earlier process hid and nobody has open."""
        self._opens = 0
        """How many times regular files are open, including opens under way."""
        self._removals = 0
        """How many removals are under way whose name was not looked up, because no file was open."""

    # -- what an earlier process left

    def begin(self) -> None:
        """Begin a fresh mount: remove the hidden names that an earlier mount left because it was never unmounted."""
        self._table.clear()
        self._orphans = [(row.ino, bytes.fromhex(row.tail), row.name) for row in self._hidden.load().values()]
        self.remove_orphans()

    def resume(self) -> list[Handle]:
        """Load and return the files and directories that were open when the mount's earlier process died."""
        for opened in self._table.load():
            node = self._nodes.by_ino.get(opened.ino)
            if node is None:
                self._table.remove(opened.fh)
                continue
            self._by_fh[opened.fh] = Handle(node, from_text(opened.tag), opened.flags)
            if node.kind == stat.S_IFREG:
                self._begin_open(node)
        for row in self._hidden.load().values():
            node = self._nodes.by_ino.get(row.ino)
            if node is not None and node.opens:
                node.hidden = bytes.fromhex(row.tail), row.name
            else:
                self._orphans.append((row.ino, bytes.fromhex(row.tail), row.name))
        return list(self._by_fh.values())

    def remove_orphans(self) -> None:
        """Remove the hidden names that an earlier process left and that no open file needs any more."""
        orphans, self._orphans = self._orphans, []
        for ino, directory, name in orphans:
            self._remove(ino, directory, name)

    def end(self) -> None:
        """Remove all hidden names, because the mount ends and nothing is open any more."""
        for node in [node for node in self._nodes.by_ino.values() if node.hidden]:
            self.unhide(node)
        if not self._hidden.load():
            with suppress(OSError):  # a full disk: the state directory stays, as if there were something left
                self._hidden.rewrite([])  # an empty file shows that no hidden name is left on the server

    def _remove(self, ino: int, directory: bytes, name: bytes) -> None:
        """Remove a hidden name. If that fails, it stays in the log, for the mount's next process to remove."""
        if not removed(name, lambda: self._client.call(calls.remove(directory, name))):
            return
        with self._lock:
            self._hidden.append([], [ino])
            if self._hidden.records > LOG_SLACK and not any(one.node.hidden for one in self._by_fh.values()):
                self._hidden.rewrite([])

    # -- opening and closing

    @contextmanager
    def opening(self, node: Node) -> Iterator[None]:
        """Wait for removals under way, then count a file as open, so that a removal hides it. An error undoes that."""
        with self._lock:
            self._lock.wait_for(lambda: not self._removals)
            self._begin_open(node)
        try:
            yield
        except BaseException:
            with self._lock:
                self._end_open(node)
            raise

    def add(self, caller: Caller, node: Node, identity: Credentials, flags: int) -> Fh:
        """Return a new handle of a directory or, within opening(), of a file."""
        fh = Fh(caller.request or next(self._fhs))
        self.close(fh)  # an earlier process made it for this very open, and died before it answered
        with self._lock:
            self._by_fh[fh] = Handle(node, identity, flags)
            self._table.add(fh, node.ino, flags, as_text(identity), 0)
        return fh

    def get(self, fh: int) -> Handle | None:
        """Return an open handle; None if neither this process nor its predecessor gave it out."""
        return self._by_fh.get(fh)

    def identity(self, fh: int) -> Credentials:
        """Return who opened a handle; for an unknown handle, the user that this process runs as."""
        handle = self.get(fh)
        return handle.identity if handle is not None else self._client.owner

    def close(self, fh: int) -> Handle | None:
        """Close a handle and return it; None for an unknown handle."""
        with self._lock:
            self._table.remove(fh)
            handle = self._by_fh.pop(fh, None)
            if handle is not None and handle.node.kind == stat.S_IFREG:
                self._end_open(handle.node)
            return handle

    def _begin_open(self, node: Node) -> None:
        node.opens += 1
        self._opens += 1

    def _end_open(self, node: Node) -> None:
        node.opens -= 1
        self._opens -= 1

    # -- removing open files

    @contextmanager
    def taking_away(self, directory: Node, name: bytes, identity: Credentials) -> Iterator[Node | None]:
        """Guard the removal of a name: yield the open file behind the name, which the caller must hide(), or None.

        While no file is open at all, the name is not looked up, and an open that begins now waits for the removal.
        """
        with self._lock:
            blind = not self._opens
            self._removals += blind
        opened = None
        try:
            opened = None if blind else self._open_behind(directory, name, identity)
            yield opened
        finally:
            with self._lock:
                self._removals -= blind
                if opened is not None:
                    self._end_open(opened)
                self._lock.notify_all()
            if opened is not None and not opened.opens:  # the last close came during the removal
                self.unhide(opened)

    def _open_behind(self, directory: Node, name: bytes, identity: Credentials) -> Node | None:
        """Return the node behind a name if it is an open file to be hidden, and count one more open. Errors: EBUSY."""
        found = self._find(directory.handle, name, identity)
        if found is None:
            return None
        with self._lock:
            node = self._nodes.of(found.handle)
            if node is None or not node.opens:
                return None
            hidden = node.hidden
        if hidden == (directory.handle, name):
            raise FSError(errno.EBUSY)  # the open file keeps this name until its last close
        if hidden is not None and self._find(*hidden, identity) is not None:
            return None
        with self._lock:
            if node.hidden != hidden:
                return None  # another thread has just hidden or closed the file
            node.hidden = None  # the server has no such name: a process died after it logged the hidden name
            self._begin_open(node)
            return node

    def _find(self, directory: bytes, name: bytes, identity: Credentials) -> calls.Found | None:
        try:
            return self._client.call(calls.lookup(directory, name), identity)
        except NFSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def hide(
        self,
        node: Node,
        directory: Node,
        identity: Credentials,
        request: Callable[[bytes, bytes], Request[object]],
    ) -> None:
        """Give an open file a hidden name, by the RENAME or LINK that request(handle of the directory, name) makes."""
        name = PREFIX + b"%016x%08x" % (node.ino, secrets.randbits(32))
        with self._lock:
            self._hidden.append([NodeRecord(node.ino, ROOT_INO, node.kind, directory.handle.hex(), name)])
        try:
            self._client.call(request(directory.handle, name), identity)
        except NFSError as error:
            if not (error.repeated and error.errno in (errno.ENOENT, errno.EEXIST)):
                with self._lock:
                    self._hidden.append([], [node.ino])
                raise
        node.hidden = directory.handle, name

    def unhide(self, node: Node) -> None:
        """Remove the hidden name of a file, if it has one."""
        with self._lock:
            hidden, node.hidden = node.hidden, None
        if hidden is not None:
            self._remove(node.ino, *hidden)


def remove_name(client: Client, request: Request[None], identity: Credentials) -> None:
    """Remove or rename a name by `request`. ENOENT is success if the request was repeated after a lost answer."""
    try:
        client.call(request, identity)
    except NFSError as error:
        if not (error.repeated and error.errno == errno.ENOENT):
            raise
