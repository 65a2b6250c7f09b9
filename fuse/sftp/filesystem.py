"""The ops.Filesystem of a mounted SFTP directory.

The server decides everything, by path, as the user who logged in. The kernel caches names and attributes for their time
to live and a file's pages until the next open; this process keeps only what open files need.

Threads: a request begins on the mount's event loop, waits for the server in a lane (a thread of the loop's pool), and
uses SFTP on the connection's thread. The lock of the nodes covers the table of open files too; no thread holds it while
it waits for the server.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import asyncssh
from asyncssh import SFTPAttrs, SFTPClient

from datastore.api.mountspec import MountSpec

from .. import ops
from ..fileserver import END_S, FileServerFilesystem, in_lane
from ..loop import Loop
from .attributes import SECOND_NS, compared, kind_of, stat_at, to_set, version_of, with_mode
from .calls import Calls, once
from .connection import Connection, SFTPFailed
from .listing import Listings
from .names import Names
from .nodes import Node, Nodes
from .opened import Handle, OpenFiles

UNKNOWN_INO = ops.Ino(0xFFFFFFFF)
"""The inode number, in directory entries, of everything that the kernel has not looked up."""


class SFTPFilesystem(FileServerFilesystem):
    """One directory. limit: the most nodes. listing_bytes: the memory for all directories together that are being read.
    resumed: the kernel knows nodes from a process of this mount that died."""

    _nodes: Nodes

    def __init__(
        self, connection: Connection, spec: MountSpec, *, loop: Loop, limit: int, listing_bytes: int, resumed: bool
    ) -> None:
        self.connection = connection
        state = Path(spec.state_dir)
        nodes = Nodes(state, limit, os.fsencode(connection.location.path))
        super().__init__(nodes, connection, spec, loop)
        self._calls = Calls(connection, nodes)
        self._files = OpenFiles(self._calls, nodes, state)
        names = Names(loop, self._calls, nodes, self._files)
        self._listings = Listings(self._calls, nodes, listing_bytes)
        self.unlink, self.rmdir, self.rename = names.unlink, names.rmdir, names.rename
        self.renamed_before, self.releasedir = names.renamed_before, self._listings.releasedir
        if resumed:
            self._files.resume()
        else:
            self._files.begin()

    # -- start and end

    def start(self, notifier: ops.Notifier) -> None:
        super().start(notifier)
        self._files.tidy()

    def status(self) -> dict[str, object]:
        why = "every open drops the kernel's pages: SFTP's times are whole seconds"
        return {**super().status(), "reads": {"path": "network", "why": why}}

    def _end(self) -> None:
        self.connection.outage_s = END_S
        clean = self._files.end()
        self.connection.stop()
        if clean:
            self._nodes.end()

    # -- the server's answers, as the kernel is told them

    def _attr(self, node: Node, given: SFTPAttrs) -> ops.Attr:
        mode, uid, gid = self._calls.owner().shown(given)
        mode, gid = self._shown(mode, gid)
        mtime_ns = (given.mtime or 0) * SECOND_NS
        return ops.Attr(
            node.ino, mode, given.size or 0, 2 if stat.S_ISDIR(mode) else 1, uid, gid,
            (given.atime or 0) * SECOND_NS, mtime_ns, mtime_ns,
        )  # fmt: skip

    def _saw(self, node: Node, given: SFTPAttrs) -> None:
        """Take the server's attributes: if they show that another client wrote, make the kernel drop its pages."""
        if node.kind == stat.S_IFREG:
            seen, node.seen = node.seen, version_of(given)
            if seen is not None and seen != node.seen:
                self._notifier.inval_inode(node.ino)

    def _reply(self, node: Node, given: SFTPAttrs) -> ops.AttrReply:
        self._saw(node, given)
        return ops.AttrReply(self._attr(node, given), self._spec.believed_s)

    def _entries(self, directory: Node, found: Sequence[tuple[bytes, SFTPAttrs]]) -> list[tuple[Node, ops.Entry]]:
        """Return the node and the kernel's entry of each found name; count one more lookup of each node."""
        nodes = self._nodes.look_up(directory, [(name, kind_of(given)) for name, given in found])
        told = []
        for node, (_, given) in zip(nodes, found, strict=True):
            self._saw(node, given)
            told.append((node, self._entry(self._attr(node, given))))
        return told

    # -- names

    def _lookup(self, caller: ops.Caller, directory: Node, name: bytes) -> ops.Entry:
        known = directory.children.get(name)

        async def look(sftp: SFTPClient, path: bytes, repeated: bool) -> tuple[SFTPAttrs, bool]:
            return await compared(lambda: self._files.attributes(known, sftp), lambda: sftp.lstat(path))

        given, replaced = self._calls.ask("lstat", directory, look, name)
        if replaced:
            self._nodes.detach(known)
        ((_, entry),) = self._entries(directory, [(name, given)])
        return entry

    @in_lane
    def mknod(self, caller: ops.Caller, parent: ops.Ino, name: bytes, mode: int, rdev: int) -> ops.Entry:
        """SFTP makes regular files only."""
        if not stat.S_ISREG(mode):
            raise ops.FSError(errno.EPERM)
        directory = self._nodes.get(parent)
        handle = Handle(directory, os.O_WRONLY)
        given = self._create_new(directory, name, mode, handle)
        self._files.close(handle)
        ((_, entry),) = self._entries(directory, [(name, given)])
        return entry

    @in_lane
    def mkdir(self, caller: ops.Caller, parent: ops.Ino, name: bytes, mode: int) -> ops.Entry:
        async def make(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            await once(sftp.mkdir(path, SFTPAttrs(permissions=mode & 0o7777)), asyncssh.SFTPFailure, repeated)
            return await with_mode(sftp, path, await sftp.lstat(path), mode)

        return self._make("mkdir", self._nodes.get(parent), name, make)

    @in_lane
    def symlink(self, caller: ops.Caller, parent: ops.Ino, name: bytes, target: bytes) -> ops.Entry:
        async def make(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            await once(sftp.symlink(target, path), asyncssh.SFTPFailure, repeated)
            return await sftp.lstat(path)

        return self._make("symlink", self._nodes.get(parent), name, make)

    def _make(
        self, what: str, directory: Node, name: bytes, call: Callable[[SFTPClient, bytes, bool], Awaitable[SFTPAttrs]]
    ) -> ops.Entry:
        with self._calls.explained(directory, name):
            given = self._calls.ask(what, directory, call, name)
        ((_, entry),) = self._entries(directory, [(name, given)])
        return entry

    async def link(self, caller: ops.Caller, ino: ops.Ino, new_parent: ops.Ino, new_name: bytes) -> ops.Entry:
        """Errors: EPERM, always, because SFTP does not tell which names are the same file."""
        raise ops.FSError(errno.EPERM)

    @in_lane
    def readlink(self, ino: ops.Ino) -> bytes:
        return self._calls.ask("readlink", self._nodes.get(ino), lambda sftp, path, _: sftp.readlink(path))

    # -- attributes

    @in_lane
    def getattr(self, ino: ops.Ino, fh: ops.Fh) -> ops.AttrReply:
        """An open file is asked by its handle: its name may be another file's by now."""
        node, handle = self._nodes.get(ino), self._files.get(fh)
        if handle is not None:
            return self._reply(node, self._files.on(handle, "fstat", lambda file: file.stat()))
        given = None
        if node.opens:
            given = self.connection.call("fstat", lambda sftp, _: self._files.attributes(node, sftp))
        return self._reply(node, given if given is not None else self._calls.lstat(node))

    @in_lane
    def setattr(self, caller: ops.Caller, ino: ops.Ino, fh: ops.Fh, changes: ops.SetAttr) -> ops.AttrReply:
        node, handle, owner = self._nodes.get(ino), self._files.get(fh), self._calls.owner()

        async def change(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            follow = node.kind != stat.S_IFLNK
            if changes.size is not None:
                if handle is not None:
                    await (await self._files.file(handle, sftp)).setstat(SFTPAttrs(size=changes.size))
                else:
                    await sftp.setstat(path, SFTPAttrs(size=changes.size))
            wanted = to_set(changes, await stat_at(sftp, path, node), owner)
            if wanted is not None:
                await sftp.setstat(path, wanted, follow_symlinks=follow)
            return await stat_at(sftp, path, node)

        if changes.size is not None:
            node.seen = None
        try:
            with self._calls.explained(node):
                return self._reply(node, self._calls.ask("setstat", node, change))
        except SFTPFailed as error:
            if error.errno == errno.EACCES and changes.size is None:
                raise ops.FSError(errno.EPERM) from None  # as chmod(2) and chown(2) answer a user who is not the owner
            raise

    @in_lane
    def statfs(self, ino: ops.Ino) -> ops.StatFs:
        """It needs the extension statvfs@openssh.com."""
        disk = self._calls.statvfs(self._nodes.get(ino))
        return ops.StatFs(disk.blocks, disk.bavail, disk.files, disk.favail, disk.frsize or disk.bsize, disk.namemax)

    # -- files

    @in_lane
    def open(self, caller: ops.Caller, ino: ops.Ino, request: ops.OpenRequest) -> ops.OpenReply:
        """The kernel drops its pages, as times in whole seconds do not show every change."""
        return self._open(caller, self._nodes.get(ino), request.flags)

    def _open(self, caller: ops.Caller, node: Node, flags: int) -> ops.OpenReply:
        """Errors: ESTALE if another client has put another file in the place of an open one. The kernel then looks the
        name up again."""
        handle = Handle(node, flags)
        truncate = asyncssh.FXF_TRUNC if flags & os.O_TRUNC else 0
        reads = flags & os.O_ACCMODE == os.O_RDONLY

        async def replaced(sftp: SFTPClient, _repeated: bool) -> bool:
            file = await self._files.file(handle, sftp)
            return (await compared(lambda: self._files.attributes(node, sftp, before=handle), file.stat))[1]

        self._files.begin_open(node)
        try:
            with nullcontext() if reads else self._calls.explained(node, grows=False):
                self.connection.call("open", lambda sftp, _: self._files.file(handle, sftp, truncate))
        except BaseException:
            self._files.end_open(node)
            raise
        fh = self._files.add(caller, handle)  # before it is compared: of two opens at once, the second sees the first
        try:
            if node.opens > 1 and self.connection.call("fstat", replaced):
                self._nodes.detach(node)
                raise ops.FSError(errno.ESTALE)
        except BaseException:
            self._files.take(fh)
            self._files.release(handle)
            raise
        if truncate:
            node.seen = None
        return ops.OpenReply(fh)

    @in_lane
    def create(
        self, caller: ops.Caller, parent: ops.Ino, name: bytes, mode: int, request: ops.OpenRequest
    ) -> tuple[ops.Entry, ops.OpenReply]:
        directory = self._nodes.get(parent)
        handle = Handle(directory, request.flags)
        try:
            given = self._create_new(directory, name, mode, handle)
        except ops.FSError as error:
            if error.errno != errno.EEXIST or request.flags & os.O_EXCL:
                raise
            ((node, entry),) = self._entries(directory, [(name, self._calls.lstat(directory, name))])
            return entry, self._open(caller, node, request.flags)
        known = directory.children.get(name)
        if known is not None and known.opens:  # another client removed it
            self._nodes.detach(known)
        ((node, entry),) = self._entries(directory, [(name, given)])
        handle.node = node
        self._files.begin_open(node)
        return entry, ops.OpenReply(self._files.add(caller, handle))

    def _create_new(self, directory: Node, name: bytes, mode: int, handle: Handle) -> SFTPAttrs:
        """Create a file that must not exist, opened as `handle`; return its attributes. Errors: EEXIST."""

        async def make(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            flags = handle.access | asyncssh.FXF_CREAT | (0 if repeated else asyncssh.FXF_EXCL)
            handle.file = await sftp.open(path, flags, SFTPAttrs(permissions=mode & 0o7777), encoding=None)
            handle.session = sftp
            return await with_mode(sftp, path, await handle.file.stat(), mode)

        with self._calls.explained(directory, name):
            return self._calls.ask("create", directory, make, name)

    async def release(self, ino: ops.Ino, fh: ops.Fh) -> None:
        handle = self._files.take(fh)
        if handle is not None:
            await self.loop.lane(self._files.release, handle)

    @in_lane
    def read(self, ino: ops.Ino, fh: ops.Fh, offset: int, size: int) -> bytes:
        """Asyncssh splits a large read into requests that it sends at once."""
        with self._files.used(ino, fh, os.O_RDONLY) as handle:
            content: bytes = self._files.on(handle, "read", lambda file: file.read(size, offset))  # type: ignore[assignment]
            return self._at_most(size, content)

    @in_lane
    def write(self, ino: ops.Ino, fh: ops.Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """The server drops setuid and setgid by itself."""
        content = bytes(payload)
        with self._files.used(ino, fh, os.O_WRONLY) as handle:
            node = handle.node
            node.seen = None
            try:
                with self._calls.explained(node):
                    self._files.on(handle, "write", lambda file: file.write(content, offset), sent=len(content))
            finally:
                node.seen = None
        return len(content)

    async def flush(self, ino: ops.Ino, fh: ops.Fh) -> None:
        """Do nothing: the server has every write that was answered."""

    async def fsync(self, ino: ops.Ino, fh: ops.Fh, datasync: bool) -> None:
        """Errors: EOPNOTSUPP if the server lacks the extension fsync@openssh.com."""
        handle = self._files.get(fh)
        if handle is not None:
            await self.loop.lane(self._files.on, handle, "fsync", lambda file: file.fsync())

    # -- directories

    async def opendir(self, caller: ops.Caller, ino: ops.Ino) -> ops.OpenDirReply:
        self._nodes.get(ino)
        return ops.OpenDirReply(self._listings.open())

    @in_lane
    def readdir(
        self, ino: ops.Ino, fh: ops.Fh, offset: int, budget: ops.DirBudget, plus: bool
    ) -> Sequence[ops.DirEntry]:
        """Errors: ENOMEM if the names need more memory than listing_bytes."""
        node, listing = self._nodes.get(ino), self._listings.get(fh)
        if listing.lines is None or offset == 0:
            self._listings.read(node, listing)
        shown = list(listing.within(budget, offset))
        fresh = plus and time.monotonic() - listing.read_at <= self._spec.believed_s
        told = [line for line in shown if fresh and self._to_tell(node, line[0])]
        entries = {name: entry for (name, _), (_, entry) in zip(told, self._entries(node, told), strict=True)}
        return [
            self._line(node, name, given, number, entries.get(name))
            for number, (name, given) in enumerate(shown, offset + 1)
        ]

    @staticmethod
    def _to_tell(directory: Node, name: bytes) -> bool:
        """Return whether the kernel is told a line's attributes: not of an open file, which may be being written."""
        node = directory.children.get(name)
        return name not in (b".", b"..") and not (node is not None and node.opens)

    @staticmethod
    def _line(directory: Node, name: bytes, given: SFTPAttrs, cursor: int, entry: ops.Entry | None) -> ops.DirEntry:
        known = directory if name == b"." else directory.parent if name == b".." else directory.children.get(name)
        ino = known.ino if known is not None else ops.ROOT_INO if name == b".." else UNKNOWN_INO
        return ops.DirEntry(name, ino, kind_of(given), cursor, entry)
