"""The table of open files, and the hidden names of files that are removed while they are open.

SFTP knows a file by its name only: a connection that breaks loses its open files, and they are opened again by name. So
an open file that is removed is renamed instead, to a hidden name (".sftp..." in its directory), until its last close.
The table and the log of hidden names (in nodes) are files that outlive this process.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import TypeVar

import asyncssh
from asyncssh import SFTPAttrs, SFTPClient

from ..fileserver import removed
from ..ops import Caller, Fh, Ino
from ..state.opens import OpenTable
from .calls import Calls
from .nodes import HIDDEN, Node, Nodes

T = TypeVar("T")
ACCESS = {
    os.O_RDONLY: asyncssh.FXF_READ,
    os.O_WRONLY: asyncssh.FXF_WRITE,
    os.O_RDWR: asyncssh.FXF_READ | asyncssh.FXF_WRITE,
    os.O_ACCMODE: asyncssh.FXF_READ | asyncssh.FXF_WRITE,
}
"""What SFTP calls the access modes of open(2). The last one, Linux's own, checks for both and gives neither."""


class Handle:
    """An open file. file: the file as opened on `session`; on a later session it is opened again by its path."""

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.access: int = ACCESS[flags & os.O_ACCMODE]
        self.session: SFTPClient | None = None
        self.file: asyncssh.SFTPClientFile | None = None
        self.opening = asyncio.Lock()


class OpenFiles:
    """All open files of a mount."""

    def __init__(self, calls: Calls, nodes: Nodes, state: Path) -> None:
        self._calls = calls
        self._nodes = nodes
        self._table = OpenTable(state / "opens")
        self._by_fh: dict[int, Handle] = {}
        self._fhs = count(time.time_ns())  # so that no fh of an earlier process is given out again
        self._left: list[bytes] = []
        """The paths of hidden names that an earlier mount left because it was never unmounted."""

    # -- what an earlier process left, and the end

    def begin(self) -> None:
        """Begin a fresh mount."""
        self._table.clear()
        self._left = self._nodes.begin()

    def resume(self) -> None:
        """Load the nodes and the files that were open when the mount's earlier process died."""
        self._nodes.resume()
        for opened in self._table.load():
            node = self._nodes.by_ino.get(opened.ino)
            if node is None:
                self._table.remove(opened.fh)
                continue
            self._by_fh[opened.fh] = Handle(node, opened.flags)
            node.opens += 1

    def tidy(self) -> None:
        """After a crash, look in the background at the hidden names that are left."""
        hidden = self._nodes.hidden()
        for node in hidden:
            node.opens += 1  # keep the node until _tidy() has looked for its hidden name, even if the kernel forgets it
        if self._left or hidden:
            threading.Thread(target=self._tidy, args=(hidden,), name="sftp-tidy", daemon=True).start()

    def _tidy(self, hidden: list[Node]) -> None:
        """Remove leftover hidden names, and look which files to be hidden have got their hidden name."""
        self._left = [path for path in self._left if not self._remove_hidden(path)]
        for node in hidden:
            directory, other = node.parent, self._nodes.hidden_name(node)
            if directory is not None and node.hidden and self._calls.is_there(directory, other):
                self._nodes.move(node, directory, other, HIDDEN)
            self.end_open(node)

    def end(self) -> bool:
        """Remove all hidden names, because nothing is open any more; return whether none is left."""
        left = [path for path in (*self._left, *self._nodes.hidden_paths()) if not self._remove_hidden(path)]
        return not left

    def _remove_hidden(self, path: bytes) -> bool:
        """Remove a hidden name by its path. Return False if that failed and the name stays on the server."""
        return removed(path, lambda: self._calls.connection.call("remove", lambda sftp, _: sftp.remove(path)))

    # -- opening and closing

    def begin_open(self, node: Node) -> None:
        """Count an open, before the server is asked, so that a removal meanwhile hides the file."""
        with self._nodes.lock:
            node.opens += 1

    def end_open(self, node: Node) -> None:
        """Count one open less. The last one of a removed file removes the hidden name, and then drops the node."""
        with self._nodes.lock:
            if node.hidden != HIDDEN or node.opens > 1 or node.parent is None:
                node.opens -= 1
                self._nodes.let_go(node)
                return
            path = self._nodes.path(node)
        if not self._remove_hidden(path):
            return  # it stays known, so that the end of this mount, or the next mount, tries again
        with self._nodes.lock:
            node.opens -= 1
            self._nodes.detach(node)
            self._nodes.let_go(node)

    def open_behind(self, directory: Node, name: bytes) -> Node | None:
        """Return the open file that has this name, which a removal has to hide, or None."""
        node = directory.children.get(name)
        return node if node is not None and node.opens and node.kind == stat.S_IFREG else None

    def add(self, caller: Caller, handle: Handle) -> Fh:
        """Return the number of a new handle, whose open is counted."""
        fh = Fh(caller.request or next(self._fhs))
        before = self.take(fh)
        if before is not None:  # an earlier process made it for this very open, and died before it answered
            self.end_open(before.node)
        with self._nodes.lock:
            self._by_fh[fh] = handle
            self._table.add(fh, handle.node.ino, handle.flags, "", 0)
        return fh

    def get(self, fh: Fh) -> Handle | None:
        """Return an open handle; None if neither this process nor its predecessor gave it out."""
        return self._by_fh.get(fh)

    def take(self, fh: Fh) -> Handle | None:
        """Take a handle out of the table, for release(); None for an unknown handle."""
        with self._nodes.lock:
            self._table.remove(fh)
            return self._by_fh.pop(fh, None)

    def release(self, handle: Handle) -> None:
        """Close a handle that was taken out."""
        try:
            self.close(handle)
        finally:
            self.end_open(handle.node)

    @contextmanager
    def used(self, ino: Ino, fh: Fh, flags: int) -> Iterator[Handle]:
        """Yield the handle; for an unknown `fh`, one of the inode's file, which is closed afterwards."""
        handle = self.get(fh)
        if handle is not None:
            yield handle
            return
        passing = Handle(self._nodes.get(ino), flags)
        try:
            yield passing
        finally:
            self.close(passing)

    # -- the server's open files

    async def file(self, handle: Handle, sftp: SFTPClient, more: int = 0) -> asyncssh.SFTPClientFile:
        """Return a handle's file on this session; open it if need be, with `more` flags."""
        async with handle.opening:
            if handle.session is not sftp or handle.file is None:
                node, flags = handle.node, handle.access | more
                try:
                    handle.file = await sftp.open(self._nodes.path(node), flags, encoding=None)
                except asyncssh.SFTPNoSuchFile:
                    if not node.hidden:
                        raise
                    handle.file = await sftp.open(self._nodes.hidden_path(node), flags, encoding=None)
                handle.session = sftp
            return handle.file

    def on(
        self, handle: Handle, what: str, call: Callable[[asyncssh.SFTPClientFile], Awaitable[T]], sent: int = 0
    ) -> T:
        """Run `call` on a handle's file. See Connection.call."""

        async def asked(sftp: SFTPClient, repeated: bool) -> T:
            return await call(await self.file(handle, sftp))

        return self._calls.connection.call(what, asked, sent=sent)

    async def attributes(
        self, node: Node | None, sftp: SFTPClient, *, before: Handle | None = None
    ) -> SFTPAttrs | None:
        """Return the attributes of an open file, by one of its handles on this session; None if there is none. before:
        only handles that are older than this one."""
        if node is None or not node.opens:
            return None
        with self._nodes.lock:
            handles = [
                each
                for each in takewhile(lambda each: each[1] is not before, self._by_fh.items())
                if each[1].node is node
            ]
        for fh, handle in handles:
            async with handle.opening:  # it is not closed meanwhile
                if fh in self._by_fh and handle.session is sftp and handle.file is not None:
                    return await handle.file.stat()
        return None

    def close(self, handle: Handle) -> None:
        """Close a handle's file on the server."""

        async def close(sftp: SFTPClient, repeated: bool) -> None:
            async with handle.opening:
                if handle.session is sftp and handle.file is not None:
                    await handle.file.close()

        self._calls.connection.call("close", close)
