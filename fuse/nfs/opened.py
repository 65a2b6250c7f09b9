"""Which files are open and by whom, and what keeps a file that is removed while it is open.

A server of version 3 knows no open files: a file that is removed is gone for all. So a client gives it another name
until the last close, as all NFS clients do (".nfs..." in its directory). Both tables outlive this process.

Threads: the file system's lock covers the tables; the server is never waited for with it.
"""

from __future__ import annotations

import errno
import logging
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from datastore.errors import StoreError
from datastore.logs import fields

from ..ops import ROOT_INO, Fh, FSError
from ..state.nodelog import NodeLog, NodeRecord
from ..state.opens import OpenTable
from . import calls
from .calls import NFSError, Request
from .client import Client, Credentials
from .identity import as_text, from_text
from .nodes import Node, Nodes

log = logging.getLogger(__name__)

PREFIX = b".nfs"
LOG_SLACK = 1000


class Handle(NamedTuple):
    """An open file or directory, and who opened it."""

    node: Node
    identity: Credentials
    flags: int


class OpenFiles:
    """All open files and directories of a mount."""

    def __init__(self, client: Client, nodes: Nodes, lock: threading.Condition, state: Path) -> None:
        """lock: the file system's; who waits for a removal is woken by it."""
        self._client = client
        self._nodes = nodes
        self._lock = lock
        self._table = OpenTable(state / "opens")
        self._hidden = NodeLog(state / "hidden.log")
        self._orphans: list[tuple[int, bytes, bytes]] = []
        """(inode, handle of the directory, name) of what was hidden, and was closed when its process died."""
        self._by_fh: dict[int, Handle] = {}
        # Not one that an earlier server gave out: the kernel may still send it, and it is another file's.
        self._fhs = count(time.time_ns())
        self._opens = 0
        """Of files, those that are being opened included."""
        self._removals = 0
        """Under way, of names behind which nobody has looked, because nothing was open."""

    # -- what an earlier process left

    def begin(self) -> None:
        """A fresh mount: remove what one that was never unmounted had hidden."""
        self._table.clear()
        self._orphans = [(row.ino, bytes.fromhex(row.tail), row.name) for row in self._hidden.load().values()]
        self.remove_orphans()

    def resume(self) -> list[Handle]:
        """What was open when a server died."""
        hidden = self._hidden.load().values()
        for opened in self._table.load():
            node = self._nodes.by_ino.get(opened.ino)
            if node is None:
                self._table.remove(opened.fh)
                continue
            self._by_fh[opened.fh] = Handle(node, from_text(opened.tag), opened.flags)
            if node.kind == stat.S_IFREG:
                self._begin_open(node)
        for row in hidden:
            node = self._nodes.by_ino.get(row.ino)
            if node is not None and node.opens:
                node.hidden = bytes.fromhex(row.tail), row.name
            else:
                self._orphans.append((row.ino, bytes.fromhex(row.tail), row.name))
        return list(self._by_fh.values())

    def remove_orphans(self) -> None:
        """Remove the other names of files that nobody has open any more."""
        orphans, self._orphans = self._orphans, []
        for ino, directory, name in orphans:
            self._remove(ino, directory, name)

    def end(self) -> None:
        """The mount ends: nothing is open any more."""
        for node in [node for node in self._nodes.by_ino.values() if node.hidden]:
            self.unhide(node)

    def _remove(self, ino: int, directory: bytes, name: bytes) -> None:
        """Remove the other name of a file. It stays when that fails, until the next mount."""
        try:
            self._client.call(calls.remove(directory, name))
        except (OSError, StoreError) as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                log.warning("a removed file keeps its other name", extra=fields(name=name, error=error))
                return
        with self._lock:
            self._hidden.append([], [ino])
            if self._hidden.records > LOG_SLACK and not any(one.node.hidden for one in self._by_fh.values()):
                self._hidden.rewrite([])

    # -- opening and closing

    @contextmanager
    def opening(self, node: Node) -> Iterator[None]:
        """While a file is being opened; it is not removed without another name from now on. An error ends that."""
        with self._lock:
            self._lock.wait_for(lambda: not self._removals)
            self._begin_open(node)
        try:
            yield
        except BaseException:
            with self._lock:
                self._end_open(node)
            raise

    def add(self, node: Node, identity: Credentials, flags: int) -> Fh:
        """A handle; of a file that was opened within opening()."""
        fh = Fh(next(self._fhs))
        with self._lock:
            self._by_fh[fh] = Handle(node, identity, flags)
            self._table.add(fh, node.ino, flags, as_text(identity), 0)
        return fh

    def get(self, fh: int) -> Handle | None:
        """None for a handle that this process and its predecessor did not give out."""
        return self._by_fh.get(fh)

    def identity(self, fh: int) -> Credentials:
        """Who opened it; for an unknown handle who mounted."""
        handle = self._by_fh.get(fh)
        return handle.identity if handle is not None else self._client.owner

    def close(self, fh: int) -> Handle | None:
        """Closed; None for an unknown handle."""
        with self._lock:
            handle = self._by_fh.pop(fh, None)
            if handle is not None:
                self._table.remove(fh)
                if handle.node.kind == stat.S_IFREG:
                    self._end_open(handle.node)
            return handle

    def _begin_open(self, node: Node) -> None:
        node.opens += 1
        self._opens += 1

    def _end_open(self, node: Node) -> None:
        node.opens -= 1
        self._opens -= 1

    # -- removing what is open

    @contextmanager
    def taking_away(self, directory: Node, name: bytes, identity: Credentials) -> Iterator[Node | None]:
        """While a name is taken away: the file behind it if it is open, which hide() has to keep.

        Where nothing is open nobody looks what is behind the name, and who opens a file meanwhile waits.
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
            if opened is not None and not opened.opens:  # it was closed meanwhile
                self.unhide(opened)

    def _open_behind(self, directory: Node, name: bytes, identity: Credentials) -> Node | None:
        """The node of a name if it is an open file, which from now on is open once more."""
        found = self._find(directory.handle, name, identity)
        if found is None:
            return None
        with self._lock:
            node = self._nodes.of(found.handle)
            if node is None or not node.opens:
                return None
            hidden = node.hidden
        if hidden == (directory.handle, name):
            raise FSError(errno.EBUSY)  # its only name, as long as it is open
        if hidden is not None and self._find(*hidden, identity) is not None:
            return None
        with self._lock:
            if node.hidden != hidden:
                return None  # somebody else has just hidden or closed it
            node.hidden = None  # who noted another name for it died before he gave it that name
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
        """Give an open file another name, by request(handle of the directory, name): a RENAME or a LINK."""
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
        """Remove the other name, if there is one."""
        with self._lock:
            hidden, node.hidden = node.hidden, None
        if hidden is not None:
            self._remove(node.ino, *hidden)


def remove_name(client: Client, request: Request[None], identity: Credentials) -> None:
    """Take a name away, or to another place. When the answer to a first request was lost, 'not there' is success."""
    try:
        client.call(request, identity)
    except NFSError as error:
        if not (error.repeated and error.errno == errno.ENOENT):
            raise
