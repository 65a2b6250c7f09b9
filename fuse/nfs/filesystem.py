"""The ops.Filesystem of a mounted NFS export.

The server decides everything: names, permissions, sizes, errors. The kernel caches names and attributes for their time
to live; this process keeps only what open files need: the version of the kernel's pages, who opened the file, writes
that the server has not committed, and the hidden name of a file that was removed while it is open.

Threads: a request begins on the event loop, and its calls to the server run in a lane, a thread of the loop's pool. The
lock of the nodes covers the open files too; no thread holds it while it waits for the server.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from datastore.api.mountspec import MountSpec
from datastore.errors import StoreError
from datastore.logs import fields

from .. import ops
from ..fileserver import END_S, NAME_MAX, FileServerFilesystem, Kept, in_lane
from ..loop import Loop
from ..state.nodelog import NodeLog
from . import calls
from .calls import Attributes, Found, NFSError
from .client import Client, Credentials
from .identity import Identities
from .listing import Listing
from .nodes import Node, Nodes, version
from .opened import OpenFiles, remove_name
from .writes import Writes

log = logging.getLogger(__name__)

BLOCK = 4096


class NFSFilesystem(FileServerFilesystem):
    """One export. limit: the most nodes. resumed: the kernel knows nodes from a process of this mount that died."""

    _nodes: Nodes

    def __init__(self, client: Client, spec: MountSpec, *, loop: Loop, limit: int, resumed: bool) -> None:
        self.client = client
        state = Path(spec.state_dir)
        nodes = Nodes(NodeLog(state / "nodes.log"), limit)
        super().__init__(nodes, client, spec, loop)
        self._files = OpenFiles(client, nodes, state)
        self._writes = Writes(client, nodes, state, spec.mountpoint)
        self._identities = Identities()
        self._listings: dict[int, Listing] = {}
        self._resumed = resumed
        if resumed:
            nodes.resume()
            client.root = nodes.root().handle
            self._writes.resume(self._files.resume())
        else:
            self._writes.begin()
            self._files.begin()
            nodes.begin(client.root)

    # -- start and end

    def start(self, notifier: ops.Notifier) -> None:
        """After a restart or a reconnect, uncommitted writes are committed, or first sent again."""
        super().start(notifier)
        self.client.on_reconnect = self._commit_soon
        if self._resumed:
            self._commit_soon()

    def _end(self) -> None:
        self.client.on_reconnect = lambda: None
        self.client.outage_s = END_S
        self._commit_writes()
        self._files.end()
        self.client.stop()

    def flush_all(self) -> list[str]:
        return self._writes.commit_all()

    def _commit_soon(self) -> None:
        threading.Thread(target=self._commit_all, name="nfs-commit", daemon=True).start()

    def _commit_all(self) -> None:
        if self.client.root != self._nodes.root().handle:
            self._nodes.move_root(self.client.root)
        self._files.remove_orphans()
        self._commit_writes()

    def _commit_writes(self) -> None:
        for line in self.flush_all():
            log.error("not on the server's disk", extra=fields(what=line))

    def status(self) -> dict[str, object]:
        why = "the kernel keeps what it has read until the server's file changes"
        reads = {"path": "keep-cache", "why": why}
        return {**super().status(), "library": self.client.library_name, "reads": reads}

    def unstored(self, *, silent: bool) -> list[Kept]:
        return self._writes.unstored(silent=silent)

    # -- the server's answers, as the kernel is told them

    def _attr(self, node: Node, given: Attributes) -> ops.Attr:
        mode, gid = self._shown(given.mode, given.gid)
        nlink = max(0, given.nlink - 1) if node.hidden else given.nlink  # minus the hidden name, if it still exists
        return ops.Attr(
            node.ino, mode, given.size, nlink, given.uid, gid,
            given.atime_ns, given.mtime_ns, given.ctime_ns, given.rdev, used=given.used,
        )  # fmt: skip

    def _reply(self, node: Node, given: Attributes) -> ops.AttrReply:
        return ops.AttrReply(self._attr(node, given), self._spec.believed_s)

    def _saw(self, node: Node, given: Attributes) -> None:
        """Take the server's attributes of a file: if they show another version, make the kernel drop its pages."""
        if node.kind != stat.S_IFREG or node.pages is None:
            return
        seen = version(given)
        # An answer from before this mount's own last change may arrive after the answer to that change.
        if seen != node.pages and seen[1] >= node.pages[1] and not self._writing(node):
            node.pages = seen
            self._notifier.inval_inode(node.ino)

    @staticmethod
    def _writing(node: Node) -> bool:
        """Return whether this mount is writing the file: attributes may show a write before its own answer arrives."""
        return node.uncommitted is not None and node.uncommitted.busy

    def _changed(self, node: Node, given: Attributes | None) -> None:
        """Take the attributes after a change by this mount, which leaves the kernel's pages valid."""
        if given is not None and node.pages is not None and given.ctime_ns >= node.pages[1]:
            node.pages = version(given)

    def _look_up(self, found: Found, directory: Node, name: bytes, identity: Credentials) -> tuple[Node, Attributes]:
        """Return the node and the attributes of what a call found or made; count one more lookup."""
        handle, attributes = found
        if not handle:  # the server may leave it out
            handle, attributes = self.client.call(calls.lookup(directory.handle, name), identity)
        if attributes is None:
            attributes = self.client.call(calls.getattr(handle), identity)
        (node,) = self._nodes.look_up([(handle, attributes)])
        return node, self._sure(node, attributes)

    def _sure(self, node: Node, attributes: Attributes) -> Attributes:
        """Return these attributes; for a file that this mount writes, ask for them again by Writes.settled()."""
        if node.uncommitted is not None:
            attributes = self._writes.settled(node, partial(self.client.call, calls.getattr(node.handle)))
        self._saw(node, attributes)
        return attributes

    def _asked(self, caller: ops.Caller) -> Credentials:
        identity = self._identities.of(caller)
        group = self._spec.group
        if group is None or group == identity.gid or group in identity.groups:
            return identity
        return identity._replace(groups=(group, *identity.groups))  # the group of the volume's pods

    # -- names

    def _lookup(self, caller: ops.Caller, directory: Node, name: bytes) -> ops.Entry:
        identity = self._asked(caller)
        found = self.client.call(calls.lookup(directory.handle, name), identity)
        return self._entry(self._attr(*self._look_up(found, directory, name, identity)))

    @in_lane
    def mknod(self, caller: ops.Caller, parent: ops.Ino, name: bytes, mode: int, rdev: int) -> ops.Entry:
        """The server decides whether it makes devices."""
        if not stat.S_ISREG(mode):
            new = ops.SetAttr(mode=mode & 0o7777)
            return self._make(caller, parent, name, partial(calls.mknod, mode=mode, rdev=rdev, changes=new))
        directory, identity = self._nodes.get(parent), self._asked(caller)
        found = self._create_new(identity, directory, name, mode)
        return self._entry(self._attr(*self._look_up(found, directory, name, identity)))

    @in_lane
    def mkdir(self, caller: ops.Caller, parent: ops.Ino, name: bytes, mode: int) -> ops.Entry:
        return self._make(caller, parent, name, partial(calls.mkdir, changes=ops.SetAttr(mode=mode & 0o7777)))

    @in_lane
    def symlink(self, caller: ops.Caller, parent: ops.Ino, name: bytes, target: bytes) -> ops.Entry:
        return self._make(caller, parent, name, partial(calls.symlink, target=target))

    def _make(
        self, caller: ops.Caller, parent: ops.Ino, name: bytes, request: Callable[[bytes, bytes], calls.Request[Found]]
    ) -> ops.Entry:
        """Make a directory, a symbolic link or a special file by `request`."""
        identity, directory = self._asked(caller), self._nodes.get(parent)
        try:
            found = self.client.call(request(directory.handle, name), identity)
        except NFSError as error:
            if not (error.repeated and error.errno == errno.EEXIST):
                raise
            found = Found(b"", None)  # the first request made it, and its answer was lost
        return self._entry(self._attr(*self._look_up(found, directory, name, identity)))

    @in_lane
    def unlink(self, caller: ops.Caller, parent: ops.Ino, name: bytes) -> None:
        """An open file gets a hidden name until its last close."""
        identity, directory = self._asked(caller), self._nodes.get(parent)
        with self._files.taking_away(directory, name, identity) as opened:
            if opened is not None:
                self._files.hide(opened, directory, identity, partial(calls.rename, directory.handle, name))
            else:
                remove_name(self.client, calls.remove(directory.handle, name), identity)

    @in_lane
    def rmdir(self, caller: ops.Caller, parent: ops.Ino, name: bytes) -> None:
        request = calls.rmdir(self._nodes.get(parent).handle, name)
        remove_name(self.client, request, self._asked(caller))

    @in_lane
    def rename(
        self, caller: ops.Caller, parent: ops.Ino, name: bytes, new_parent: ops.Ino, new_name: bytes, flags: int
    ) -> None:
        """Version 3 knows none of the flags."""
        if flags:
            raise ops.FSError(errno.EINVAL)
        identity, old, new = self._asked(caller), self._nodes.get(parent), self._nodes.get(new_parent)
        request = calls.rename(old.handle, name, new.handle, new_name)
        with self._files.taking_away(new, new_name, identity) as opened:
            if opened is None:
                remove_name(self.client, request, identity)
                return
            source = self.client.call(calls.lookup(old.handle, name), identity)
            if source.handle == opened.handle:  # two names of one file: POSIX says that nothing happens
                return
            # Link the replaced file to its hidden name, instead of a rename, so that the new name is never missing.
            self._files.hide(opened, new, identity, partial(calls.link, opened.handle))
            try:
                remove_name(self.client, request, identity)
            except (OSError, StoreError):
                self._files.unhide(opened)
                raise

    @in_lane
    def link(self, caller: ops.Caller, ino: ops.Ino, new_parent: ops.Ino, new_name: bytes) -> ops.Entry:
        node, directory = self._nodes.get(ino), self._nodes.get(new_parent)
        try:
            self.client.call(calls.link(node.handle, directory.handle, new_name), self._asked(caller))
        except NFSError as error:
            if not (error.repeated and error.errno == errno.EEXIST):
                raise
        return self._lookup(caller, directory, new_name)

    @in_lane
    def readlink(self, ino: ops.Ino) -> bytes:
        return self.client.call(calls.readlink(self._nodes.get(ino).handle))

    # -- attributes

    @in_lane
    def getattr(self, ino: ops.Ino, fh: ops.Fh) -> ops.AttrReply:
        node = self._nodes.get(ino)
        attributes = self._writes.settled(node, partial(self.client.call, calls.getattr(node.handle)))
        self._saw(node, attributes)
        return self._reply(node, attributes)

    @in_lane
    def setattr(self, caller: ops.Caller, ino: ops.Ino, fh: ops.Fh, changes: ops.SetAttr) -> ops.AttrReply:
        node, identity = self._nodes.get(ino), self._asked(caller)
        if changes.size is not None and self._files.get(fh) is not None:
            identity = self._files.identity(fh)  # the user who opened the file may change its size
        return self._reply(node, self._set(node, identity, changes))

    def _set(self, node: Node, identity: Credentials, changes: ops.SetAttr) -> Attributes:
        request = calls.setattr(node.handle, changes._replace(ctime_ns=None, kill_suidgid=False))

        def change() -> Attributes:
            after = self.client.call(request, identity)
            return after if after is not None else self.client.call(calls.getattr(node.handle), identity)

        def change_in_order() -> Attributes:
            if node.uncommitted is None or changes.size is None:
                return change()
            return node.uncommitted.resize(change, changes.size)

        after = self._writes.settled(node, change_in_order)
        self._changed(node, after)
        return after

    @in_lane
    def statfs(self, ino: ops.Ino) -> ops.StatFs:
        """The figures of the server, which may be those of a quota on the directory."""
        space = self.client.call(calls.fsstat(self._nodes.get(ino).handle))
        blocks, free = space.bytes // BLOCK, space.bytes_available // BLOCK
        return ops.StatFs(blocks, free, space.files, space.files_available, BLOCK, NAME_MAX)

    # -- files

    @in_lane
    def open(self, caller: ops.Caller, ino: ops.Ino, request: ops.OpenRequest) -> ops.OpenReply:
        node, identity, flags = self._nodes.get(ino), self._asked(caller), request.flags
        mode = flags & os.O_ACCMODE
        with self._files.opening(node):
            wanted = calls.READ | calls.MODIFY | calls.EXTEND | calls.EXECUTE
            granted, attributes = self.client.call(calls.access(node.handle, wanted), identity)
            readable = granted & (calls.READ | calls.EXECUTE)  # the kernel must read a file to execute it
            writable = granted & (calls.MODIFY | calls.EXTEND)
            if (mode != os.O_WRONLY and not readable) or (mode != os.O_RDONLY and not writable):
                raise ops.FSError(errno.EACCES)
            if flags & os.O_TRUNC:
                attributes = self._set(node, identity, ops.SetAttr(size=0))
            elif attributes is None:
                attributes = self.client.call(calls.getattr(node.handle), identity)
            pages = node.pages
            seen = version(self._sure(node, attributes))
            keep = pages == seen or self._writing(node)
            if not keep:
                node.pages = seen
            return ops.OpenReply(self._files.add(caller, node, identity, flags), keep_cache=keep)

    @in_lane
    def create(
        self, caller: ops.Caller, parent: ops.Ino, name: bytes, mode: int, request: ops.OpenRequest
    ) -> tuple[ops.Entry, ops.OpenReply]:
        directory, identity = self._nodes.get(parent), self._asked(caller)
        if request.flags & os.O_EXCL:
            found = self._create_new(identity, directory, name, mode)
        else:
            new = ops.SetAttr(mode=mode & 0o7777, size=0 if request.flags & os.O_TRUNC else None)
            found = self.client.call(calls.create(directory.handle, name, new), identity)
        node, attributes = self._look_up(found, directory, name, identity)
        with self._files.opening(node):
            node.pages = version(attributes)
            opened = ops.OpenReply(self._files.add(caller, node, identity, request.flags))
        return self._entry(self._attr(node, attributes)), opened

    def _create_new(self, identity: Credentials, directory: Node, name: bytes, mode: int) -> Found:
        """Create a file that must not exist. If an answer was lost, the access time tells if this call made it."""
        stamp = time.time_ns()
        request = calls.create(directory.handle, name, ops.SetAttr(mode=mode & 0o7777, atime_ns=stamp), exclusive=True)
        try:
            return self.client.call(request, identity)
        except NFSError as error:
            if not (error.repeated and error.errno == errno.EEXIST):
                raise
            found = self.client.call(calls.lookup(directory.handle, name), identity)
            if found.attributes is None or found.attributes.atime_ns != stamp:
                raise
            return found

    async def release(self, ino: ops.Ino, fh: ops.Fh) -> None:
        handle = self._files.close(fh)
        if handle is None or handle.node.opens:
            return
        if handle.node.hidden or handle.node.uncommitted is not None:
            await self.loop.lane(self._last_close, handle.node)

    def _last_close(self, node: Node) -> None:
        try:
            if node.hidden:
                self._files.unhide(node)
            elif node.uncommitted:  # the file was written through a memory map after the last close(2)
                node.uncommitted.commit(self.client)
        finally:
            self._writes.end(node)

    @in_lane
    def read(self, ino: ops.Ino, fh: ops.Fh, offset: int, size: int) -> bytes:
        node = self._nodes.get(ino)
        return self._writes.settled(node, partial(self._read_once, node, self._files.identity(fh), offset, size))

    def _read_once(self, node: Node, identity: Credentials, offset: int, size: int) -> bytes:
        client, (most, _) = self.client, self.client.sizes()
        places = [(at, min(at + most, offset + size)) for at in range(offset, offset + size, most)]
        requests = [calls.read(node.handle, at, end - at) for at, end in places]
        pieces: list[bytes] = []
        for (at, end), answer in zip(places, client.gather(requests, identity), strict=True):
            while True:
                pieces.append(self._at_most(end - at, answer.content))
                at += len(answer.content)
                if answer.end or at >= end or not answer.content:
                    break
                answer = client.call(calls.read(node.handle, at, end - at), identity)  # READ may send less than asked
            if answer.attributes is not None:
                self._saw(node, answer.attributes)
            if answer.end:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @in_lane
    def write(self, ino: ops.Ino, fh: ops.Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """The server drops setuid and setgid by itself."""
        node, content = self._nodes.get(ino), bytes(payload)
        self._changed(node, self._writes.write(node, self._files.identity(fh), offset, content))
        self._writes.keep_to_limit(node)
        return len(content)

    async def flush(self, ino: ops.Ino, fh: ops.Fh) -> None:
        """When a close returns, the server has the bytes on its disk."""
        uncommitted = self._nodes.get(ino).uncommitted
        if uncommitted:
            await self.loop.lane(uncommitted.commit, self.client)

    async def fsync(self, ino: ops.Ino, fh: ops.Fh, datasync: bool) -> None:
        await self.flush(ino, fh)

    # -- directories

    async def opendir(self, caller: ops.Caller, ino: ops.Ino) -> ops.OpenDirReply:
        fh = self._files.add(caller, self._nodes.get(ino), self._asked(caller), os.O_DIRECTORY)
        self._listings[fh] = Listing(resumed=False)
        return ops.OpenDirReply(fh)

    @in_lane
    def readdir(
        self, ino: ops.Ino, fh: ops.Fh, offset: int, budget: ops.DirBudget, plus: bool
    ) -> Sequence[ops.DirEntry]:
        """Cursors are the server's cookies."""
        listing = self._listings.setdefault(fh, Listing(resumed=True))
        node, identity = self._nodes.get(ino), self._files.identity(fh)
        lines = listing.after(self.client, node, identity, offset, budget, self._spec.believed_s)
        told = [(line, line.attributes) for line in lines if plus and line.attributes and self._to_tell(line)]
        nodes = self._nodes.look_up([(line.handle, attributes) for line, attributes in told])
        entries: dict[bytes, ops.Entry] = {}
        for (line, attributes), found in zip(told, nodes, strict=True):
            self._saw(found, attributes)
            entries[line.name] = self._entry(self._attr(found, attributes))
        listing.passed(lines)
        return [_dir_entry(line, entries.get(line.name)) for line in lines]

    def _to_tell(self, line: calls.Line) -> bool:
        """Return whether the kernel is told a line's attributes: not of a file that this mount writes, see _sure()."""
        node = self._nodes.of(line.handle)
        ours = node is not None and node.uncommitted is not None
        return bool(line.handle) and line.name not in (b".", b"..") and not ours

    def releasedir(self, ino: ops.Ino, fh: ops.Fh) -> None:
        self._listings.pop(fh, None)
        self._files.close(fh)


def _dir_entry(line: calls.Line, entry: ops.Entry | None) -> ops.DirEntry:
    attr = entry.attr if entry is not None else None
    mode = line.attributes.mode if line.attributes is not None else 0
    return ops.DirEntry(line.name, attr.ino if attr is not None else ops.Ino(line.fileid), mode, line.cookie, entry)
