"""The ops.Filesystem of a mounted NFS export.

The server decides everything: names, permissions, sizes, errors. The kernel caches names and attributes for their time
to live; this process keeps only what open files need: the version of the kernel's pages, who opened the file, writes
that the server has not committed, and the hidden name of a file that was removed while it is open.

Threads: a request begins on the event loop, and its calls to the server run in a lane, a thread of the loop's pool. One
lock covers the nodes and the open files; no thread holds it while it waits for the server.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from datastore.errors import StoreError
from datastore.logs import fields

from ..fileserver import END_S, NAME_MAX, FileServerFilesystem, Kept
from ..loop import Loop
from ..ops import (
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
from ..state.nodelog import NodeLog
from . import calls
from .calls import Attributes, Found, NFSError
from .client import Client, Credentials
from .identity import Identities
from .nodes import Node, Nodes, version
from .opened import OpenFiles, remove_name
from .uncommitted import Uncommitted

log = logging.getLogger(__name__)

T = TypeVar("T")
LISTING_BYTES = 64 << 10
"""The size of the answer that a READDIRPLUS asks for."""
UNCOMMITTED_BYTES = 64 << 20
"""The most bytes, of all files, that are kept until the server commits them; beyond it a write commits its file."""
BLOCK = 4096


class _Listing:
    """A directory that is being read: the entries that the server has sent and the kernel has not read yet."""

    __slots__ = ("at", "end", "lines", "read_at", "verifier")

    def __init__(self) -> None:
        self.at = 0
        """The cookie after which `lines` begin."""
        self.lines: list[calls.Line] = []
        self.end = False
        self.read_at = 0.0
        self.verifier: int | None = 0
        """The cookie verifier; None if an earlier process opened the directory: then the server is asked for it."""


class NFSFilesystem(FileServerFilesystem):
    """One export. state: the directory of the files that tell a later process what the kernel knows and what is open.

    ttl_s: how long the kernel may cache names and attributes. group: everything is shown with this group, which may do
    what the owner may; None: as it is. resumed: the kernel knows nodes from a process of this mount that died. named:
    returns the path of each open file that is known, by its inode number, for messages.
    """

    _nodes: Nodes

    def __init__(
        self,
        client: Client,
        state: Path,
        *,
        loop: Loop,
        ttl_s: float,
        group: int | None,
        limit: int,
        resumed: bool,
        named: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.client = client
        self._named = named
        nodes = Nodes(NodeLog(state / "nodes.log"), limit)
        super().__init__(nodes, client, loop=loop, ttl_s=ttl_s, group=group)
        self._files = OpenFiles(client, self._nodes, self._lock, state)
        self._written: dict[Node, Uncommitted] = {}
        self._identities = Identities()
        self._listings: dict[int, _Listing] = {}
        self._verifier = state / "verifier"
        self._resumed = resumed
        self._seen_verifier: int | None = None
        if not resumed:
            self._verifier.unlink(missing_ok=True)
            self._files.begin()
            self._nodes.begin(client.root)
            return
        self._seen_verifier = self._read_verifier()
        self._nodes.resume()
        client.root = self._nodes.root().handle
        for handle in self._files.resume():
            if handle.flags & os.O_ACCMODE != os.O_RDONLY:
                node, identity = handle.node, handle.identity
                self._written[node] = node.uncommitted = Uncommitted(node.handle, identity, self._seen_verifier)

    # -- start and end

    def start(self, notifier: Notifier) -> None:
        """See ops.Filesystem. After a restart or a reconnect, uncommitted writes are committed, or first sent again."""
        self._notifier = notifier
        self.client.on_reconnect = self._commit_soon
        if self._resumed:
            self._commit_soon()

    def _end(self) -> None:
        self.client.on_reconnect = lambda: None
        self.client.outage_s = END_S
        for line in self.flush_all():
            log.error("not on the server's disk", extra=fields(what=line))
        self._files.end()
        self.client.stop()

    def flush_all(self) -> list[str]:
        """Have the server commit everything; return a line for each file that it did not commit."""
        with self._lock:
            written = list(self._written.items())
        failures: list[tuple[Node, Uncommitted, Exception]] = []
        silent = None
        for node, uncommitted in written:
            try:
                if silent is None:
                    uncommitted.settle(self.client)
            except StoreError as error:
                silent = error  # each other file would wait for the same timeout
            except OSError as error:
                failures.append((node, uncommitted, error))
            if silent is not None and uncommitted:
                failures.append((node, uncommitted, silent))
        self._learn_paths([(node, uncommitted) for node, uncommitted, _ in failures])
        return [f"{uncommitted.path or f'inode {node.ino}'}: {error}" for node, uncommitted, error in failures]

    def _commit_soon(self) -> None:
        threading.Thread(target=self._commit_all, name="nfs-commit", daemon=True).start()

    def _commit_all(self) -> None:
        if self.client.root != self._nodes.root().handle:
            with self._lock:
                self._nodes.move_root(self.client.root)
        self._files.remove_orphans()
        for line in self.flush_all():
            log.error("not on the server's disk", extra=fields(what=line))

    def status(self) -> dict[str, object]:
        """See FileServerFilesystem."""
        why = "the kernel keeps what it has read until the server's file changes"
        reads = {"path": "keep-cache", "why": why}
        return {**super().status(), "library": self.client.library_name, "reads": reads}

    def unstored(self, *, silent: bool) -> list[Kept]:
        """See FileServerFilesystem."""
        with self._lock:
            found = [(node, one) for node, one in self._written.items() if one and (silent or one.error)]
        self._learn_paths(found)
        return [Kept(one.path or f"inode {node.ino}", one.bytes, one.since, one.error) for node, one in found]

    def _learn_paths(self, files: Sequence[tuple[Node, Uncommitted]]) -> None:
        """Note the paths of these files, as far as they are known. That of a detached mount's file is not known."""
        named = self._named() if files else {}
        for node, uncommitted in files:
            uncommitted.path = named.get(node.ino, uncommitted.path)

    def uncommitted_bytes(self) -> int:
        """Return how many bytes this process wrote that the server has not committed yet."""
        with self._lock:
            return sum(one.bytes for one in self._written.values())

    # -- the server's answers, as the kernel is told them

    def _attr(self, node: Node, given: Attributes) -> Attr:
        mode, gid = self._shown(given.mode, given.gid)
        nlink = max(0, given.nlink - 1) if node.hidden else given.nlink  # minus the hidden name, if it still exists
        return Attr(
            node.ino, mode, given.size, nlink, given.uid, gid,
            given.atime_ns, given.mtime_ns, given.ctime_ns, given.rdev, used=given.used,
        )  # fmt: skip

    def _entry(self, node: Node, given: Attributes) -> Entry:
        return Entry(self._attr(node, given), self._ttl_s, self._ttl_s)

    def _reply(self, node: Node, given: Attributes) -> AttrReply:
        return AttrReply(self._attr(node, given), self._ttl_s)

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
        with self._lock:
            (node,) = self._nodes.look_up([(handle, attributes)])
            surplus = self._nodes.surplus()
        if surplus:
            self._notifier.release(surplus)
        return node, self._sure(node, attributes)

    def _sure(self, node: Node, attributes: Attributes) -> Attributes:
        """Return these attributes; for a file that this mount writes, ask for them again by _settled()."""
        if node.uncommitted is not None:
            attributes = self._settled(node, partial(self.client.call, calls.getattr(node.handle)))
        self._saw(node, attributes)
        return attributes

    def _settled(self, node: Node, ask: Callable[[], T]) -> T:
        """Return the result of `ask` about a file, asked when all writes that a server restart lost are sent again."""
        while True:
            uncommitted, connection = node.uncommitted, self.client.reconnects
            if not uncommitted:
                return ask()
            if uncommitted.unsure(self.client):
                uncommitted.settle(self.client)
            answer = ask()
            if connection == self.client.reconnects:
                return answer

    def _asked(self, caller: Caller) -> Credentials:
        identity = self._identities.of(caller)
        group = self.group
        if group is None or group == identity.gid or group in identity.groups:
            return identity
        return identity._replace(groups=(group, *identity.groups))  # the group of the volume's pods

    # -- names

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        """See ops.Filesystem. The kernel looks up each name first, so a name that is too long gets no further."""
        if len(name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        return await self.loop.lane(self._lookup, self._asked(caller), self._nodes.get(parent), name)

    def _lookup(self, identity: Credentials, directory: Node, name: bytes) -> Entry:
        try:
            found = self.client.call(calls.lookup(directory.handle, name), identity)
        except NFSError as error:
            if error.errno != errno.ENOENT:
                raise
            return Entry(None, self._ttl_s)
        return self._entry(*self._look_up(found, directory, name, identity))

    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """See ops.Filesystem; the server decides whether it makes devices."""
        if not stat.S_ISREG(mode):
            new = SetAttr(mode=mode & 0o7777)
            return await self._make(caller, parent, name, partial(calls.mknod, mode=mode, rdev=rdev, changes=new))
        directory, identity = self._nodes.get(parent), self._asked(caller)

        def make() -> Entry:
            found = self._create_new(identity, directory, name, mode)
            return self._entry(*self._look_up(found, directory, name, identity))

        return await self.loop.lane(make)

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        """See ops.Filesystem."""
        return await self._make(caller, parent, name, partial(calls.mkdir, changes=SetAttr(mode=mode & 0o7777)))

    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        """See ops.Filesystem."""
        return await self._make(caller, parent, name, partial(calls.symlink, target=target))

    async def _make(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        request: Callable[[bytes, bytes], calls.Request[Found]],
    ) -> Entry:
        """Make a directory, a symbolic link or a special file by `request`."""
        identity, directory = self._asked(caller), self._nodes.get(parent)

        def make() -> Entry:
            try:
                found = self.client.call(request(directory.handle, name), identity)
            except NFSError as error:
                if not (error.repeated and error.errno == errno.EEXIST):
                    raise
                found = Found(b"", None)  # the first request made it, and its answer was lost
            return self._entry(*self._look_up(found, directory, name, identity))

        return await self.loop.lane(make)

    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """See ops.Filesystem. An open file gets a hidden name until its last close."""
        await self.loop.lane(self._unlink, self._asked(caller), self._nodes.get(parent), name)

    def _unlink(self, identity: Credentials, directory: Node, name: bytes) -> None:
        with self._files.taking_away(directory, name, identity) as opened:
            if opened is not None:
                self._files.hide(opened, directory, identity, partial(calls.rename, directory.handle, name))
            else:
                remove_name(self.client, calls.remove(directory.handle, name), identity)

    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """See ops.Filesystem."""
        request = calls.rmdir(self._nodes.get(parent).handle, name)
        await self.loop.lane(remove_name, self.client, request, self._asked(caller))

    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """See ops.Filesystem; version 3 knows none of the flags."""
        if flags:
            raise FSError(errno.EINVAL)
        directories = self._nodes.get(parent), self._nodes.get(new_parent)
        await self.loop.lane(self._rename, self._asked(caller), directories, name, new_name)

    def _rename(self, identity: Credentials, directories: tuple[Node, Node], name: bytes, new_name: bytes) -> None:
        old, new = directories
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

    async def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Entry:
        """See ops.Filesystem."""
        node, directory, identity = self._nodes.get(ino), self._nodes.get(new_parent), self._asked(caller)

        def make() -> Entry:
            try:
                self.client.call(calls.link(node.handle, directory.handle, new_name), identity)
            except NFSError as error:
                if not (error.repeated and error.errno == errno.EEXIST):
                    raise
            return self._lookup(identity, directory, new_name)

        return await self.loop.lane(make)

    async def readlink(self, ino: Ino) -> bytes:
        """See ops.Filesystem."""
        return await self.loop.lane(self.client.call, calls.readlink(self._nodes.get(ino).handle))

    # -- attributes

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply:
        """See ops.Filesystem."""
        return await self.loop.lane(self._getattr, self._nodes.get(ino))

    def _getattr(self, node: Node) -> AttrReply:
        attributes = self._settled(node, partial(self.client.call, calls.getattr(node.handle)))
        self._saw(node, attributes)
        return self._reply(node, attributes)

    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply:
        """See ops.Filesystem."""
        node, identity = self._nodes.get(ino), self._asked(caller)
        if changes.size is not None and self._files.get(fh) is not None:
            identity = self._files.identity(fh)  # the user who opened the file may change its size
        return self._reply(node, await self.loop.lane(self._set, node, identity, changes))

    def _set(self, node: Node, identity: Credentials, changes: SetAttr) -> Attributes:
        request = calls.setattr(node.handle, changes._replace(ctime_ns=None, kill_suidgid=False))

        def change() -> Attributes:
            after = self.client.call(request, identity)
            return after if after is not None else self.client.call(calls.getattr(node.handle), identity)

        def change_in_order() -> Attributes:
            if node.uncommitted is None or changes.size is None:
                return change()
            return node.uncommitted.resize(change, changes.size)

        after = self._settled(node, change_in_order)
        self._changed(node, after)
        return after

    async def statfs(self, ino: Ino) -> StatFs:
        """See ops.Filesystem: the figures of the server, which may be those of a quota on the directory."""
        space = await self.loop.lane(self.client.call, calls.fsstat(self._nodes.get(ino).handle))
        return StatFs(
            space.bytes // BLOCK,
            space.bytes_available // BLOCK,
            space.files,
            space.files_available,
            BLOCK,
            NAME_MAX,
        )

    # -- files

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply:
        """See ops.Filesystem."""
        return await self.loop.lane(self._open, caller, self._nodes.get(ino), request.flags)

    def _open(self, caller: Caller, node: Node, flags: int) -> OpenReply:
        identity, mode = self._asked(caller), flags & os.O_ACCMODE
        with self._files.opening(node):
            wanted = calls.READ | calls.MODIFY | calls.EXTEND | calls.EXECUTE
            granted, attributes = self.client.call(calls.access(node.handle, wanted), identity)
            readable = granted & (calls.READ | calls.EXECUTE)  # the kernel must read a file to execute it
            writable = granted & (calls.MODIFY | calls.EXTEND)
            if (mode != os.O_WRONLY and not readable) or (mode != os.O_RDONLY and not writable):
                raise FSError(errno.EACCES)
            if flags & os.O_TRUNC:
                attributes = self._set(node, identity, SetAttr(size=0))
            elif attributes is None:
                attributes = self.client.call(calls.getattr(node.handle), identity)
            pages = node.pages
            seen = version(self._sure(node, attributes))
            keep = pages == seen or self._writing(node)
            if not keep:
                node.pages = seen
            return OpenReply(self._files.add(node, identity, flags, caller.request), keep_cache=keep)

    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """See ops.Filesystem."""
        directory, identity = self._nodes.get(parent), self._asked(caller)
        new = SetAttr(mode=mode & 0o7777, size=0 if request.flags & os.O_TRUNC else None)

        def make() -> tuple[Entry, OpenReply]:
            if request.flags & os.O_EXCL:
                found = self._create_new(identity, directory, name, mode)
            else:
                found = self.client.call(calls.create(directory.handle, name, new), identity)
            node, attributes = self._look_up(found, directory, name, identity)
            with self._files.opening(node):
                node.pages = version(attributes)
                opened = OpenReply(self._files.add(node, identity, request.flags, caller.request))
            return self._entry(node, attributes), opened

        return await self.loop.lane(make)

    def _create_new(self, identity: Credentials, directory: Node, name: bytes, mode: int) -> Found:
        """Create a file that must not exist. If an answer was lost, the access time tells if this call made it."""
        stamp = time.time_ns()
        request = calls.create(directory.handle, name, SetAttr(mode=mode & 0o7777, atime_ns=stamp), exclusive=True)
        try:
            return self.client.call(request, identity)
        except NFSError as error:
            if not (error.repeated and error.errno == errno.EEXIST):
                raise
            found = self.client.call(calls.lookup(directory.handle, name), identity)
            if found.attributes is None or found.attributes.atime_ns != stamp:
                raise
            return found

    async def release(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
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
            with self._lock:
                if not node.opens:
                    node.uncommitted = None
                    self._written.pop(node, None)

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> bytes:
        """See ops.Filesystem."""
        node = self._nodes.get(ino)
        ask = partial(self._read_once, node, self._files.identity(fh), offset, size)
        return await self.loop.lane(self._settled, node, ask)

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

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """See ops.Filesystem; the server drops setuid and setgid by itself."""
        return await self.loop.lane(self._write, self._nodes.get(ino), self._files.identity(fh), offset, bytes(payload))

    def _write(self, node: Node, identity: Credentials, offset: int, content: bytes) -> int:
        with self._lock:
            uncommitted = node.uncommitted
            if uncommitted is None:
                self._written[node] = node.uncommitted = uncommitted = Uncommitted(node.handle, identity)
        written = uncommitted.write(self.client, identity, offset, content)
        self._changed(node, written.attributes)
        if written.verifier != self._seen_verifier:
            self._write_verifier(written.verifier)
        if self.uncommitted_bytes() > UNCOMMITTED_BYTES:
            uncommitted.commit(self.client)
        return len(content)

    async def flush(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem: when a close returns, the server has the bytes on its disk."""
        uncommitted = self._nodes.get(ino).uncommitted
        if uncommitted:
            await self.loop.lane(uncommitted.commit, self.client)

    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None:
        """See ops.Filesystem."""
        await self.flush(ino, fh)

    def _read_verifier(self) -> int | None:
        """Return the verifier of this mount's last write, by an earlier process of it; None: nothing was written."""
        try:
            return int(self._verifier.read_text())
        except FileNotFoundError:
            return None

    def _write_verifier(self, verifier: int) -> None:
        """Save the verifier for a later process of the mount, which must know whether the server restarted since."""
        self._seen_verifier = verifier
        temporary = self._verifier.with_suffix(".new")
        temporary.write_text(str(verifier))
        temporary.replace(self._verifier)

    # -- directories

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply:
        """See ops.Filesystem."""
        fh = self._files.add(self._nodes.get(ino), self._asked(caller), os.O_DIRECTORY)
        self._listings[fh] = _Listing()
        return OpenDirReply(fh)

    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        """See ops.Filesystem. Cursors are the server's cookies."""
        listing = self._listings.get(fh)
        if listing is None:  # an earlier process opened the directory
            listing = self._listings[fh] = _Listing()
            listing.verifier = None
        node, identity = self._nodes.get(ino), self._files.identity(fh)
        return await self.loop.lane(self._readdir, node, identity, listing, offset, budget, plus)

    def _readdir(
        self, node: Node, identity: Credentials, listing: _Listing, offset: int, budget: DirBudget, plus: bool
    ) -> Sequence[DirEntry]:
        stale = time.monotonic() - listing.read_at > self._ttl_s
        if offset != listing.at or stale or (not listing.lines and not listing.end):
            if listing.verifier is None and offset:
                listing.verifier = self.client.call(calls.readdir(node.handle, 0, 0, LISTING_BYTES), identity).verifier
            verifier = listing.verifier if offset and listing.verifier else 0
            answer = self.client.call(calls.readdir(node.handle, offset, verifier, LISTING_BYTES), identity)
            listing.lines, listing.end, listing.verifier = answer.lines, answer.end, answer.verifier
            listing.at, listing.read_at = offset, time.monotonic()
        taken = 0
        while taken < len(listing.lines) and budget.take(len(listing.lines[taken].name)):
            taken += 1
        lines = listing.lines[:taken]
        told = [(line, line.attributes) for line in lines if plus and line.attributes and self._to_tell(line)]
        with self._lock:
            nodes = self._nodes.look_up([(line.handle, attributes) for line, attributes in told])
            surplus = self._nodes.surplus()
        entries: dict[bytes, Entry] = {}
        for (line, attributes), found in zip(told, nodes, strict=True):
            self._saw(found, attributes)
            entries[line.name] = self._entry(found, attributes)
        if surplus:
            self._notifier.release(surplus)
        # This comes after all that can fail. An interrupted caller repeats its cookie, and the server is asked again.
        del listing.lines[:taken]
        listing.at = lines[-1].cookie if lines else offset
        return [_dir_entry(line, entries.get(line.name)) for line in lines]

    def _to_tell(self, line: calls.Line) -> bool:
        """Return whether the kernel is told a line's attributes: not of a file that this mount writes, see _sure()."""
        node = self._nodes.of(line.handle)
        ours = node is not None and node.uncommitted is not None
        return bool(line.handle) and line.name not in (b".", b"..") and not ours

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        self._listings.pop(fh, None)
        self._files.close(fh)


def _dir_entry(line: calls.Line, entry: Entry | None) -> DirEntry:
    attr = entry.attr if entry is not None else None
    mode = line.attributes.mode if line.attributes is not None else 0
    return DirEntry(line.name, attr.ino if attr is not None else Ino(line.fileid), mode, line.cookie, entry)
