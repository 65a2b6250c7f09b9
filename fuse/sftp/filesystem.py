"""The ops.Filesystem of a mounted SFTP directory.

The server decides everything, by path, as the user who logged in. The kernel caches names and attributes for their time
to live and a file's pages until the next open; this process keeps only what open files need.

Threads: a request begins on the mount's event loop, waits for the server in a lane (a thread of the loop's pool), and
uses SFTP on the connection's thread. One lock covers the nodes and the table of open files; no thread holds it while it
waits for the server.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import TypeVar

import asyncssh
from asyncssh import SFTPAttrs, SFTPClient

from datastore.errors import StoreError
from datastore.logs import fields

from ..fileserver import END_S, NAME_MAX, FileServerFilesystem
from ..loop import Loop
from ..ops import (
    ROOT_INO,
    Attr,
    AttrReply,
    Caller,
    DirBudget,
    DirEntry,
    Entry,
    Fh,
    FSError,
    Ino,
    Notifier,
    OpenDirReply,
    OpenReply,
    OpenRequest,
    SetAttr,
    StatFs,
)
from ..state.opens import OpenTable
from .attributes import SECOND_NS, Owner, compared, kind_of, stat_at, to_set, version_of, with_mode
from .connection import Connection, SFTPFailed
from .nodes import HIDDEN, Node, Nodes

log = logging.getLogger(__name__)

T = TypeVar("T")
LINE = struct.Struct("<IIIIIQ")
"""What follows the name and a zero byte in a packed directory entry: mode, uid, gid, atime, mtime, size."""
LINE_BYTES = 64
"""The memory of a packed entry besides its bytes: for a Python object, and its place in a list."""
READ_ONLY = 1
"""The flag of a read-only disk in the answer to statvfs@openssh.com (PROTOCOL of OpenSSH)."""
PATH_MAX = 4096
"""The length from which Linux takes no path. An SSH server answers then as if the message were wrong."""
UNKNOWN_INO = Ino(0xFFFFFFFF)
"""The inode number, in directory entries, of everything that the kernel has not looked up."""


class Handle:
    """An open file. file: the file as opened on `session`; on a later session it is opened again by its path."""

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.session: SFTPClient | None = None
        self.file: asyncssh.SFTPClientFile | None = None
        self.opening = asyncio.Lock()


class _Listing:
    """A directory that is being read: its entries sorted by name, each packed, because there may be millions."""

    def __init__(self) -> None:
        self.lines: list[bytes] | None = None
        self.read_at = 0.0
        self.closed = False
        self.bytes = 0
        """The memory that `lines` take."""


class SFTPFilesystem(FileServerFilesystem):
    """One directory. state: where a later process of the mount finds what the kernel knows and what is open.

    ttl_s: how long the kernel may cache names and attributes. group: everything is shown with this group, which may do
    what the owner may; None: as it is. resumed: the kernel knows nodes from a process of this mount that died.
    listing_bytes: the memory for all directories together that are being read.
    """

    _nodes: Nodes

    def __init__(
        self,
        connection: Connection,
        state: Path,
        *,
        loop: Loop,
        ttl_s: float,
        group: int | None,
        limit: int,
        listing_bytes: int,
        resumed: bool,
    ) -> None:
        self.connection = connection
        nodes = Nodes(state, limit, os.fsencode(connection.location.path))
        super().__init__(nodes, connection, loop=loop, ttl_s=ttl_s, group=group)
        self._owner: Owner | None = None
        self._table = OpenTable(state / "opens")
        self._handles: dict[int, Handle] = {}
        self._listings: dict[int, _Listing] = {}
        self._listing_bytes = listing_bytes
        self._fhs = count(time.time_ns())  # no fh of an earlier process is given out again
        self._left: list[bytes] = []
        """The paths of hidden names that an earlier mount left because it was never unmounted."""
        if resumed:
            self._resume()
        else:
            self._table.clear()
            self._left = self._nodes.begin()

    def _resume(self) -> None:
        self._nodes.resume()
        for opened in self._table.load():
            node = self._nodes.by_ino.get(opened.ino)
            if node is None:
                self._table.remove(opened.fh)
                continue
            self._handles[opened.fh] = Handle(node, opened.flags)
            node.opens += 1

    # -- start and end

    def start(self, notifier: Notifier) -> None:
        """See ops.Filesystem."""
        self._notifier = notifier
        hidden = self._nodes.hidden()
        for node in hidden:
            node.opens += 1  # keep the node until _tidy() has looked for its hidden name, even if the kernel forgets it
        if self._left or hidden:
            threading.Thread(target=self._tidy, args=(hidden,), name="sftp-tidy", daemon=True).start()

    def _tidy(self, hidden: list[Node]) -> None:
        """After a crash, remove leftover hidden names, and look which files to be hidden have got their hidden name."""
        self._left = [path for path in self._left if not self._remove_hidden(path)]
        for node in hidden:
            directory, other = node.parent, self._nodes.hidden_name(node)
            if directory is not None and node.hidden and self._is_there(directory, other):
                with self._lock:
                    self._nodes.move(node, directory, other, HIDDEN)
            self._end_open(node)

    def status(self) -> dict[str, object]:
        """See FileServerFilesystem."""
        why = "every open drops the kernel's pages: SFTP's times are whole seconds"
        return {**super().status(), "reads": {"path": "network", "why": why}}

    def _end(self) -> None:
        self.connection.outage_s = END_S
        left = [path for path in [*self._left, *self._nodes.hidden_paths()] if not self._remove_hidden(path)]
        self.connection.stop()
        if not left:
            self._nodes.end()

    def _remove_hidden(self, path: bytes) -> bool:
        """Remove a hidden name by its path. Return False if that failed and the name stays on the server."""
        try:
            self.connection.call("remove", lambda sftp, _: sftp.remove(path))
        except (OSError, StoreError) as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                log.warning("a removed file keeps its other name", extra=fields(path=path, error=error))
                return False
        return True

    # -- calls to the server

    def _ask(
        self,
        what: str,
        node: Node,
        call: Callable[[SFTPClient, bytes, bool], Awaitable[T]],
        name: bytes | None = None,
    ) -> T:
        """Run call(session, path, repeated) with the path of the node, or of `name` in it. See connection.Call.

        The call is made again if the server answered "no such file" because a directory above was renamed meanwhile.
        """

        async def asked(sftp: SFTPClient, repeated: bool) -> T:
            while True:
                path = self._nodes.path(node, name)
                try:
                    return await call(sftp, path, repeated)
                except asyncssh.SFTPNoSuchFile:
                    if self._nodes.path(node, name) == path:
                        raise
                except asyncssh.SFTPBadMessage:
                    if len(path) < PATH_MAX:
                        raise
                    raise FSError(errno.ENAMETOOLONG) from None

        return self.connection.call(what, asked)

    def _lstat(self, node: Node, name: bytes | None = None) -> SFTPAttrs:
        return self._ask("lstat", node, lambda sftp, path, _: stat_at(sftp, path, node if name is None else None), name)

    async def _opened(self, node: Node | None, sftp: SFTPClient, *, before: Handle | None = None) -> SFTPAttrs | None:
        """Return the attributes of an open file, by one of its handles on this session; None if there is none. before:
        only handles that are older than this one."""
        if node is None or not node.opens:
            return None
        with self._lock:
            handles = [
                each
                for each in takewhile(lambda each: each[1] is not before, self._handles.items())
                if each[1].node is node
            ]
        for fh, handle in handles:
            async with handle.opening:  # it is not closed meanwhile
                if fh in self._handles and handle.session is sftp and handle.file is not None:
                    return await handle.file.stat()
        return None

    def _is_there(self, directory: Node, name: bytes) -> bool:
        try:
            self._lstat(directory, name)
        except SFTPFailed:
            return False
        return True

    def owner(self) -> Owner:
        """Return whose files are shown as the mounting user's own. Errors: StoreError, SFTPFailed.

        SFTP does not tell the login's uid, so it is taken from the owner of the directory in which a session begins.
        For a login that is confined to a directory (ChrootDirectory) that owner is root, which tells nothing.
        """
        if self._owner is None:
            home = self.connection.call("lstat", lambda sftp, _: sftp.stat(b"."))
            user = self.connection.username()
            known = home.uid or (0 if user == "root" and os.getuid() == 0 else None)
            self._owner = Owner(os.getuid(), os.getgid(), known, home.gid or 0)
        return self._owner

    def _attr(self, node: Node, given: SFTPAttrs) -> Attr:
        owner, mode = self.owner(), given.permissions or 0
        uid, gid = given.uid or 0, given.gid or 0
        if owner.remote_uid is None or uid == owner.remote_uid:
            uid = owner.uid
        elif not stat.S_ISLNK(mode):
            # The login's groups are unknown too: give all others the group's permissions, and let the server refuse.
            mode |= (mode & stat.S_IRWXG) >> 3
        if owner.remote_uid is None or gid == owner.remote_gid:
            gid = owner.gid
        mode, gid = self._shown(mode, gid)
        mtime_ns = (given.mtime or 0) * SECOND_NS
        return Attr(
            node.ino, mode, given.size or 0, 2 if stat.S_ISDIR(mode) else 1, uid, gid,
            (given.atime or 0) * SECOND_NS, mtime_ns, mtime_ns,
        )  # fmt: skip

    def _saw(self, node: Node, given: SFTPAttrs) -> None:
        """Take the server's attributes: if they show that another client wrote, make the kernel drop its pages."""
        if node.kind == stat.S_IFREG:
            seen, node.seen = node.seen, version_of(given)
            if seen is not None and seen != node.seen:
                self._notifier.inval_inode(node.ino)

    def _reply(self, node: Node, given: SFTPAttrs) -> AttrReply:
        self._saw(node, given)
        return AttrReply(self._attr(node, given), self._ttl_s)

    def _entries(self, directory: Node, found: Sequence[tuple[bytes, SFTPAttrs]]) -> list[tuple[Node, Entry]]:
        """Return the node and the kernel's entry of each found name; count one more lookup of each node."""
        with self._lock:
            nodes = self._nodes.look_up(directory, [(name, kind_of(given)) for name, given in found])
            surplus = self._nodes.surplus()
        told = []
        for node, (_, given) in zip(nodes, found, strict=True):
            self._saw(node, given)
            told.append((node, Entry(self._attr(node, given), self._ttl_s, self._ttl_s)))
        if surplus:
            self._notifier.release(surplus)
        return told

    # -- names

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        """See ops.Filesystem. The kernel looks up each name first, so a name that is too long gets no further."""
        if len(name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        return await self.loop.lane(self._lookup, self._nodes.get(parent), name)

    def _lookup(self, directory: Node, name: bytes) -> Entry:
        known = directory.children.get(name)

        async def look(sftp: SFTPClient, path: bytes, repeated: bool) -> tuple[SFTPAttrs, bool]:
            return await compared(lambda: self._opened(known, sftp), lambda: sftp.lstat(path))

        try:
            given, replaced = self._ask("lstat", directory, look, name)
        except SFTPFailed as error:
            if error.errno != errno.ENOENT:
                raise
            return Entry(None, self._ttl_s)
        if replaced:
            self._gone(known)
        ((_, entry),) = self._entries(directory, [(name, given)])
        return entry

    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """See ops.Filesystem; SFTP makes regular files only."""
        if not stat.S_ISREG(mode):
            raise FSError(errno.EPERM)
        directory = self._nodes.get(parent)

        def make() -> Entry:
            handle = Handle(directory, os.O_WRONLY)
            given = self._create_new(directory, name, mode, handle)
            self._close(handle)
            ((_, entry),) = self._entries(directory, [(name, given)])
            return entry

        return await self.loop.lane(make)

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        """See ops.Filesystem."""

        async def make(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            await _once(sftp.mkdir(path, SFTPAttrs(permissions=mode & 0o7777)), asyncssh.SFTPFailure, repeated)
            return await with_mode(sftp, path, await sftp.lstat(path), mode)

        return await self._make("mkdir", parent, name, make)

    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        """See ops.Filesystem."""

        async def make(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            await _once(sftp.symlink(target, path), asyncssh.SFTPFailure, repeated)
            return await sftp.lstat(path)

        return await self._make("symlink", parent, name, make)

    async def _make(
        self, what: str, parent: Ino, name: bytes, call: Callable[[SFTPClient, bytes, bool], Awaitable[SFTPAttrs]]
    ) -> Entry:
        directory = self._nodes.get(parent)

        def make() -> Entry:
            try:
                given = self._ask(what, directory, call, name)
            except SFTPFailed as error:
                raise self._named(error, directory, name) from None
            ((_, entry),) = self._entries(directory, [(name, given)])
            return entry

        return await self.loop.lane(make)

    def _named(self, error: SFTPFailed, directory: Node, name: bytes) -> FSError:
        """Return the likely meaning of a vague failure to make a name: EEXIST if it is taken, else see _of_disk()."""
        if not error.vague:
            return error
        return FSError(errno.EEXIST) if self._is_there(directory, name) else self._of_disk(error, directory)

    def _of_disk(self, error: SFTPFailed, node: Node, *, grows: bool = True, source: Node | None = None) -> FSError:
        """Return the likely meaning of a vague failure of a change, because SFTP has no codes for these: EROFS if the
        server's disk is read-only; EXDEV if the name comes from a directory (source) on another disk; ENOSPC if the
        disk is full and the change needs room on it (grows); else the error."""
        if not error.vague:
            return error
        try:
            disk = self._statvfs(node)
            elsewhere = source is not None and self._statvfs(source).fsid != disk.fsid
        except (OSError, StoreError):
            return error
        if disk.flags & READ_ONLY:
            return FSError(errno.EROFS)
        if elsewhere:
            return FSError(errno.EXDEV)
        full = disk.bavail == 0 or (disk.files and disk.favail == 0)
        return FSError(errno.ENOSPC) if full and grows else error

    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """See ops.Filesystem. An open file gets a hidden name until its last close."""
        await self.loop.lane(self._unlink, self._nodes.get(parent), name)

    def _unlink(self, directory: Node, name: bytes) -> None:
        node = directory.children.get(name)
        if node is not None and node.opens and node.kind == stat.S_IFREG:
            if node.hidden == HIDDEN:
                raise FSError(errno.EBUSY)  # the open file keeps this name until its last close
            self._begin_open(node)  # so that no close during the removal is the last one
            try:
                self._hide(node, directory, name)
            finally:
                self._end_open(node)
            return

        async def remove(sftp: SFTPClient, path: bytes, repeated: bool) -> None:
            await _once(sftp.remove(path), asyncssh.SFTPNoSuchFile, repeated)

        try:
            self._ask("remove", directory, remove, name)
        except SFTPFailed as error:
            raise self._of_disk(error, directory, grows=False) from None
        self._gone(node)

    def _gone(self, node: Node | None) -> None:
        if node is not None:
            with self._lock:
                self._nodes.detach(node)

    def _hide(self, node: Node, directory: Node, name: bytes) -> None:
        """Give an open file its hidden name, until its last close."""
        other = self._nodes.hidden_name(node)
        with self._lock:
            self._nodes.hide(node)
        try:
            self._move("rename", directory, name, directory, other)
        except SFTPFailed as error:
            if error.errno != errno.ENOENT or not self._is_there(directory, other):  # unless a dead process did it
                node.hidden = ""
                raise
        with self._lock:
            self._nodes.move(node, directory, other, HIDDEN)

    def _show(self, node: Node, directory: Node, name: bytes) -> None:
        """Give a hidden file its name back, because the rename that was to replace it failed."""
        self._move("rename", directory, node.name, directory, name)
        with self._lock:
            self._nodes.move(node, directory, name)

    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """See ops.Filesystem."""
        await self.loop.lane(self._rmdir, self._nodes.get(parent), name)

    def _rmdir(self, directory: Node, name: bytes) -> None:
        async def remove(sftp: SFTPClient, path: bytes, repeated: bool) -> None:
            try:
                await _once(sftp.rmdir(path), asyncssh.SFTPNoSuchFile, repeated)
            except asyncssh.SFTPFailure:
                async for line in sftp.scandir(path):
                    if line.filename not in (b".", b".."):
                        raise FSError(errno.ENOTEMPTY) from None
                raise

        try:
            self._ask("rmdir", directory, remove, name)
        except SFTPFailed as error:
            raise self._of_disk(error, directory, grows=False) from None
        self._gone(directory.children.get(name))

    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """See ops.Filesystem."""
        if flags & ~1:
            raise FSError(errno.EINVAL)
        old, new = self._nodes.get(parent), self._nodes.get(new_parent)
        await self.loop.lane(self._rename, old, new, name, new_name, bool(flags))

    def _rename(self, old: Node, new: Node, name: bytes, new_name: bytes, no_replace: bool) -> None:
        if no_replace:
            self._move("rename-new", old, name, new, new_name)
        else:
            replaced = new.children.get(new_name)
            if replaced is not None and replaced.opens and replaced.kind == stat.S_IFREG:
                self._replace_open(replaced, old, name, new, new_name)
            else:
                self._move("rename", old, name, new, new_name)
        self._renamed(old, name, new, new_name)

    def _renamed(self, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        with self._lock:
            node = old.children.get(name)
            if node is not None:
                self._nodes.move(node, new, new_name)
            elif (shown := new.children.get(new_name)) is not None:
                self._nodes.detach(shown)

    async def renamed_before(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes) -> None:
        """See ops.KnowsFilesByName."""
        old, new = self._nodes.get(parent), self._nodes.get(new_parent)
        if name in old.children and await self.loop.lane(self._is_there, new, new_name):
            self._renamed(old, name, new, new_name)

    def _replace_open(self, replaced: Node, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        """Rename over an open file, which gets a hidden name; for a moment the new name does not exist."""
        if not self._is_there(old, name):
            raise FSError(errno.ENOENT)
        self._begin_open(replaced)
        try:
            self._hide(replaced, new, new_name)
            try:
                self._move("rename", old, name, new, new_name)
            except (OSError, StoreError):
                self._show(replaced, new, new_name)
                raise
        finally:
            self._end_open(replaced)

    def _move(self, what: str, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        """Rename. what: "rename" (an extension) replaces a taken name, "rename-new" (version 3's own) gives EEXIST."""

        async def move(sftp: SFTPClient, path: bytes, repeated: bool) -> None:
            to = self._nodes.path(new, new_name)
            moved = sftp.posix_rename(path, to) if what == "rename" else sftp.rename(path, to)
            await _once(moved, asyncssh.SFTPNoSuchFile, repeated)

        try:
            self._ask(what, old, move, name)
        except SFTPFailed as error:
            if not error.vague or not self._is_there(new, new_name):
                raise self._of_disk(error, new, grows=False, source=old) from None
            if what != "rename":
                raise FSError(errno.EEXIST) from None
            raise self._why_not_replaced(error, old, name, new, new_name) from None

    def _why_not_replaced(self, error: SFTPFailed, old: Node, name: bytes, new: Node, new_name: bytes) -> FSError:
        from_directory = kind_of(self._lstat(old, name)) == stat.S_IFDIR
        to_directory = kind_of(self._lstat(new, new_name)) == stat.S_IFDIR
        if from_directory and to_directory:
            return FSError(errno.ENOTEMPTY)
        if from_directory:
            return FSError(errno.ENOTDIR)
        return FSError(errno.EISDIR) if to_directory else self._of_disk(error, new, grows=False, source=old)

    async def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Entry:
        """Errors: EPERM, always, because SFTP does not tell which names are the same file."""
        raise FSError(errno.EPERM)

    async def readlink(self, ino: Ino) -> bytes:
        """See ops.Filesystem."""
        node = self._nodes.get(ino)
        return await self.loop.lane(self._ask, "readlink", node, lambda sftp, path, _: sftp.readlink(path))

    # -- attributes

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply:
        """See ops.Filesystem. An open file is asked by its handle: its name may be another file's by now."""
        node, handle = self._nodes.get(ino), self._handles.get(fh)

        def ask() -> AttrReply:
            if handle is not None:
                return self._reply(node, self._on(handle, "fstat", lambda file: file.stat()))
            given = self.connection.call("fstat", lambda sftp, _: self._opened(node, sftp)) if node.opens else None
            return self._reply(node, given if given is not None else self._lstat(node))

        return await self.loop.lane(ask)

    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply:
        """See ops.Filesystem."""
        return await self.loop.lane(self._set, self._nodes.get(ino), self._handles.get(fh), changes)

    def _set(self, node: Node, handle: Handle | None, changes: SetAttr) -> AttrReply:
        owner = self.owner()

        async def change(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            follow = node.kind != stat.S_IFLNK
            if changes.size is not None:
                if handle is not None:
                    await (await self._file(handle, sftp)).setstat(SFTPAttrs(size=changes.size))
                else:
                    await sftp.setstat(path, SFTPAttrs(size=changes.size))
            wanted = to_set(changes, await stat_at(sftp, path, node), owner)
            if wanted is not None:
                await sftp.setstat(path, wanted, follow_symlinks=follow)
            return await stat_at(sftp, path, node)

        if changes.size is not None:
            node.seen = None
        try:
            given = self._ask("setstat", node, change)
        except SFTPFailed as error:
            if error.errno == errno.EACCES and changes.size is None:
                raise FSError(errno.EPERM) from None  # as chmod(2) and chown(2) answer a user who is not the owner
            raise self._of_disk(error, node) from None
        return self._reply(node, given)

    async def statfs(self, ino: Ino) -> StatFs:
        """See ops.Filesystem; it needs the extension statvfs@openssh.com."""
        return await self.loop.lane(self._statfs, self._nodes.get(ino))

    def _statvfs(self, node: Node) -> asyncssh.SFTPVFSAttrs:
        return self._ask("statvfs", node, lambda sftp, path, _: sftp.statvfs(path))

    def _statfs(self, node: Node) -> StatFs:
        given = self._statvfs(node)
        return StatFs(given.blocks, given.bavail, given.files, given.favail, given.frsize or given.bsize, given.namemax)

    # -- files

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply:
        """See ops.Filesystem. The kernel drops its pages, as times in whole seconds do not show every change."""
        return await self.loop.lane(self._open, caller, self._nodes.get(ino), request.flags)

    def _open(self, caller: Caller, node: Node, flags: int) -> OpenReply:
        """Errors: ESTALE if another client has put another file in the place of an open one. The kernel then looks the
        name up again."""
        handle = Handle(node, flags)
        truncate = asyncssh.FXF_TRUNC if flags & os.O_TRUNC else 0

        async def replaced(sftp: SFTPClient, _repeated: bool) -> bool:
            file = await self._file(handle, sftp)
            return (await compared(lambda: self._opened(node, sftp, before=handle), file.stat))[1]

        self._begin_open(node)
        try:
            self.connection.call("open", lambda sftp, _: self._file(handle, sftp, truncate))
        except BaseException as error:
            self._end_open(node)
            if isinstance(error, SFTPFailed) and flags & os.O_ACCMODE != os.O_RDONLY:
                raise self._of_disk(error, node, grows=False) from None
            raise
        fh = self._add(caller, handle)  # before it is compared: of two opens at once, the second one sees the first
        try:
            if node.opens > 1 and self.connection.call("fstat", replaced):
                self._gone(node)
                raise FSError(errno.ESTALE)
        except BaseException:
            self._take(fh)
            self._release(handle)
            raise
        if truncate:
            node.seen = None
        return OpenReply(fh)

    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """See ops.Filesystem."""
        directory = self._nodes.get(parent)

        def make() -> tuple[Entry, OpenReply]:
            handle = Handle(directory, request.flags)
            try:
                given = self._create_new(directory, name, mode, handle)
            except FSError as error:
                if error.errno != errno.EEXIST or request.flags & os.O_EXCL:
                    raise
                ((node, entry),) = self._entries(directory, [(name, self._lstat(directory, name))])
                return entry, self._open(caller, node, request.flags)
            known = directory.children.get(name)
            if known is not None and known.opens:  # another client removed it
                self._gone(known)
            ((node, entry),) = self._entries(directory, [(name, given)])
            handle.node = node
            self._begin_open(node)
            return entry, OpenReply(self._add(caller, handle))

        return await self.loop.lane(make)

    def _create_new(self, directory: Node, name: bytes, mode: int, handle: Handle) -> SFTPAttrs:
        """Create a file that must not exist, opened as `handle`; return its attributes. Errors: EEXIST."""

        async def make(sftp: SFTPClient, path: bytes, repeated: bool) -> SFTPAttrs:
            flags = _access(handle.flags) | asyncssh.FXF_CREAT | (0 if repeated else asyncssh.FXF_EXCL)
            handle.file = await sftp.open(path, flags, SFTPAttrs(permissions=mode & 0o7777), encoding=None)
            handle.session = sftp
            return await with_mode(sftp, path, await handle.file.stat(), mode)

        try:
            return self._ask("create", directory, make, name)
        except SFTPFailed as error:
            raise self._named(error, directory, name) from None

    async def _file(self, handle: Handle, sftp: SFTPClient, more: int = 0) -> asyncssh.SFTPClientFile:
        """Return a handle's file on this session; open it if need be, with `more` flags."""
        async with handle.opening:
            if handle.session is not sftp or handle.file is None:
                node, flags = handle.node, _access(handle.flags) | more
                try:
                    handle.file = await sftp.open(self._nodes.path(node), flags, encoding=None)
                except asyncssh.SFTPNoSuchFile:
                    if not node.hidden:
                        raise
                    handle.file = await sftp.open(self._nodes.hidden_path(node), flags, encoding=None)
                handle.session = sftp
            return handle.file

    def _on(
        self,
        handle: Handle,
        what: str,
        call: Callable[[asyncssh.SFTPClientFile], Awaitable[T]],
        sent: int = 0,
    ) -> T:
        async def asked(sftp: SFTPClient, repeated: bool) -> T:
            return await call(await self._file(handle, sftp))

        return self.connection.call(what, asked, sent=sent)

    def _begin_open(self, node: Node) -> None:
        with self._lock:
            node.opens += 1

    def _end_open(self, node: Node) -> None:
        """Count one open less. The last one of a removed file removes the hidden name, and then drops the node."""
        with self._lock:
            if node.hidden != HIDDEN or node.opens > 1 or node.parent is None:
                node.opens -= 1
                self._nodes.let_go(node)
                return
            path = self._nodes.path(node)
        if not self._remove_hidden(path):
            return  # it stays known, so that the end of this mount, or the next mount, tries again
        with self._lock:
            node.opens -= 1
            self._nodes.detach(node)
            self._nodes.let_go(node)

    def _add(self, caller: Caller, handle: Handle) -> Fh:
        fh = Fh(caller.request or next(self._fhs))
        before = self._take(fh)
        if before is not None:  # an earlier process made it for this very open, and died before it answered
            self._end_open(before.node)
        with self._lock:
            self._handles[fh] = handle
            self._table.add(fh, handle.node.ino, handle.flags, "", 0)
        return fh

    def _take(self, fh: Fh) -> Handle | None:
        with self._lock:
            self._table.remove(fh)
            return self._handles.pop(fh, None)

    def _handle(self, ino: Ino, fh: Fh, flags: int) -> tuple[Handle, bool]:
        """Return the handle, and whether it is for this call only: for an unknown `fh` the inode's file is opened."""
        handle = self._handles.get(fh)
        return (handle, False) if handle is not None else (Handle(self._nodes.get(ino), flags), True)

    async def release(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        handle = self._take(fh)
        if handle is not None:
            await self.loop.lane(self._release, handle)

    def _release(self, handle: Handle) -> None:
        node = handle.node
        try:
            self._close(handle)
        finally:
            self._end_open(node)

    def _close(self, handle: Handle) -> None:
        async def close(sftp: SFTPClient, repeated: bool) -> None:
            async with handle.opening:
                if handle.session is sftp and handle.file is not None:
                    await handle.file.close()

        self.connection.call("close", close)

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> bytes:
        """See ops.Filesystem. asyncssh splits a large read into requests that it sends at once."""

        def ask() -> bytes:
            handle, passing = self._handle(ino, fh, os.O_RDONLY)
            try:
                content: bytes = self._on(handle, "read", lambda file: file.read(size, offset))  # type: ignore[assignment]
                return self._at_most(size, content)
            finally:
                if passing:
                    self._close(handle)

        return await self.loop.lane(ask)

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """See ops.Filesystem; the server drops setuid and setgid by itself."""
        content = bytes(payload)

        def send() -> int:
            handle, passing = self._handle(ino, fh, os.O_WRONLY)
            node = handle.node
            node.seen = None
            try:
                self._on(handle, "write", lambda file: file.write(content, offset), sent=len(content))
            except SFTPFailed as error:
                raise self._of_disk(error, node) from None
            finally:
                node.seen = None
                if passing:
                    self._close(handle)
            return len(content)

        return await self.loop.lane(send)

    async def flush(self, ino: Ino, fh: Fh) -> None:
        """Do nothing: the server has every write that was answered."""

    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None:
        """See ops.Filesystem. Errors: EOPNOTSUPP if the server lacks the extension fsync@openssh.com."""
        handle = self._handles.get(fh)
        if handle is not None:
            await self.loop.lane(self._on, handle, "fsync", lambda file: file.fsync())

    # -- directories

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply:
        """See ops.Filesystem."""
        self._nodes.get(ino)
        fh = Fh(next(self._fhs))
        self._listings[fh] = _Listing()
        return OpenDirReply(fh)

    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        """See ops.Filesystem. SFTP has no cursors: the first call reads all names, and a cursor is an index in their
        sorted list. Errors: ENOMEM if the names need more memory than listing_bytes."""
        listing = self._listings.setdefault(fh, _Listing())  # if an earlier process opened it, it is read again
        return await self.loop.lane(self._readdir, self._nodes.get(ino), listing, offset, budget, plus)

    def _readdir(self, node: Node, listing: _Listing, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        lines = listing.lines
        if lines is None or offset == 0:
            lines = self._list(node, listing)
        taken, shown = offset, []
        while taken < len(lines) and budget.take(len(lines[taken]) - LINE.size - 1):
            shown.append(_unpacked(lines[taken]))
            taken += 1
        fresh = plus and time.monotonic() - listing.read_at <= self._ttl_s
        told = [line for line in shown if fresh and self._to_tell(node, line[0])]
        entries = {name: entry for (name, _), (_, entry) in zip(told, self._entries(node, told), strict=True)}
        return [
            self._line(node, name, given, number, entries.get(name))
            for number, (name, given) in enumerate(shown, offset + 1)
        ]

    def _list(self, node: Node, listing: _Listing) -> list[bytes]:
        """Read all entries of a directory from the server. Errors: ENOMEM."""
        self._let_go(listing)

        async def scan(sftp: SFTPClient, path: bytes, repeated: bool) -> list[bytes]:
            self._let_go(listing)
            lines = []
            async for found in sftp.scandir(path):
                lines.append(_packed(os.fsencode(found.filename), found.attrs))
                size = LINE_BYTES + len(lines[-1])
                with self._lock:
                    listing.bytes += size
                    self._listing_bytes -= size
                    full = self._listing_bytes < 0
                if full:
                    log.error(
                        "a directory has too many names to be listed; --memory lets more be",
                        extra=fields(path=path, names=len(lines)),
                    )
                    raise FSError(errno.ENOMEM)
            return lines

        try:
            lines = self._ask("readdir", node, scan)
        except BaseException:
            self._let_go(listing)
            raise
        lines.sort()
        listing.lines, listing.read_at = lines, time.monotonic()
        if listing.closed:  # the caller was interrupted and has closed the directory
            self._let_go(listing)
        return lines

    def _let_go(self, listing: _Listing) -> None:
        with self._lock:
            self._listing_bytes += listing.bytes
            listing.lines, listing.bytes = None, 0

    @staticmethod
    def _to_tell(directory: Node, name: bytes) -> bool:
        """Return whether the kernel is told a line's attributes: not of an open file, which may be being written."""
        node = directory.children.get(name)
        return name not in (b".", b"..") and not (node is not None and node.opens)

    @staticmethod
    def _line(directory: Node, name: bytes, given: SFTPAttrs, cursor: int, entry: Entry | None) -> DirEntry:
        if entry is not None and entry.attr is not None:
            ino = entry.attr.ino
        elif name == b".":
            ino = directory.ino
        elif name == b"..":
            ino = directory.parent.ino if directory.parent is not None else ROOT_INO
        else:
            known = directory.children.get(name)
            ino = known.ino if known is not None else UNKNOWN_INO
        return DirEntry(name, ino, kind_of(given), cursor, entry)

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        listing = self._listings.pop(fh, None)
        if listing is not None:
            listing.closed = True
            self._let_go(listing)


def _packed(name: bytes, given: SFTPAttrs) -> bytes:
    """Pack a directory entry; a zero byte, which no name contains, ends the name, so that entries sort by name."""
    numbers = (given.permissions, given.uid, given.gid, given.atime, given.mtime, given.size)
    return name + b"\0" + LINE.pack(*(number or 0 for number in numbers))


def _unpacked(line: bytes) -> tuple[bytes, SFTPAttrs]:
    at = len(line) - LINE.size
    mode, uid, gid, atime, mtime, size = LINE.unpack_from(line, at)
    return line[: at - 1], SFTPAttrs(permissions=mode, uid=uid, gid=gid, atime=atime, mtime=mtime, size=size)


def _access(flags: int) -> int:
    return {
        os.O_RDONLY: asyncssh.FXF_READ,
        os.O_WRONLY: asyncssh.FXF_WRITE,
        os.O_RDWR: asyncssh.FXF_READ | asyncssh.FXF_WRITE,
    }[flags & os.O_ACCMODE]


async def _once(change: Awaitable[None], done: type[asyncssh.SFTPError], repeated: bool) -> None:
    """Make a change. repeated: an earlier session may have made it already; then the error `done` is success."""
    try:
        await change
    except done:
        if not repeated:
            raise
