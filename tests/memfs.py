"""An in-memory Filesystem for the engine's tests, and a builder that makes a mount of it.

It implements as much of fuse/ops.py as the tests use. Calls are answered at once, or, if wanted, after `delay_s` in a
lane (a thread of the loop's pool). Inode numbers of the fixed tree (`populate`) depend on the tree alone, so that a
restarted server gives the same. The labels of a MountSpec choose the behaviour: see build().
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from datastore.api.mountspec import MountSpec
from datastore.errors import CredentialsInvalid
from datastore.fuse.kernel import abi
from datastore.fuse.kernel.negotiate import FEATURES
from datastore.fuse.loop import Loop
from datastore.fuse.ops import (
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

PATTERN_FILES = 200


def pattern(number: int) -> bytes:
    """The content of file `number` of the fixed tree, up to 200 KiB; it depends on the number alone."""
    return b"%06d:" % number * (100 + number * 146)


@dataclass
class Node:
    """One inode. content for files, target for symlinks, children for directories."""

    ino: Ino
    mode: int
    uid: int = 0
    gid: int = 0
    parent: Ino = ROOT_INO
    content: bytearray = field(default_factory=bytearray)
    target: bytes = b""
    children: dict[bytes, Ino] = field(default_factory=dict)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    nlink: int = 1

    def attr(self) -> Attr:
        size = len(self.target) or len(self.content)
        return Attr(self.ino, self.mode, size, self.nlink, self.uid, self.gid, 0, 0, 0)


class MemFs:
    """ttl_s: how long the kernel may cache names and attributes. blocking: names of calls that wait in a lane."""

    def __init__(
        self, *, ttl_s: float = 1.0, keep_cache: bool = True, delay_s: float = 0.0, blocking: Sequence[str] = ()
    ) -> None:
        self.loop = Loop()
        self.ttl_s = ttl_s
        self.keep_cache = keep_cache
        self.delay_s = delay_s
        self.blocking = frozenset(blocking)
        self.nodes: dict[Ino, Node] = {ROOT_INO: Node(ROOT_INO, stat.S_IFDIR | 0o777, os.geteuid(), os.getegid())}
        self.calls: Counter[str] = Counter()
        self.lookups: Counter[int] = Counter()
        self.open_handles: set[int] = set()
        self.passthrough_fd: Callable[[Ino], int] = lambda _: -1
        self.notifier: Notifier | None = None
        self.started = self.stopped = 0
        self._next = 1 << 20

    # -- the tree

    def make(self, parent: Ino, name: bytes, mode: int, *, ino: int = 0) -> Node:
        if not ino:
            self._next += 1
            ino = self._next
        above = self.nodes[parent]
        node = Node(Ino(ino), mode, above.uid, above.gid, parent)
        self.nodes[node.ino] = node
        above.children[name] = node.ino
        return node

    def populate(self) -> None:
        """Make the fixed tree: d/000 ... d/199, whose inode numbers and contents never change."""
        directory = self.make(ROOT_INO, b"d", stat.S_IFDIR | 0o755, ino=2)
        for number in range(PATTERN_FILES):
            node = self.make(directory.ino, b"%03d" % number, stat.S_IFREG | 0o644, ino=1000 + number)
            node.content[:] = pattern(number)

    def _node(self, ino: Ino) -> Node:
        node = self.nodes.get(ino)
        if node is None:
            raise FSError(errno.ESTALE)
        return node

    def _child(self, parent: Ino, name: bytes) -> Node | None:
        ino = self._node(parent).children.get(name)
        return None if ino is None else self.nodes[ino]

    def _free(self, parent: Ino, name: bytes) -> None:
        if self._child(parent, name) is not None:
            raise FSError(errno.EEXIST)

    def _entry(self, node: Node) -> Entry:
        self.lookups[node.ino] += 1
        return Entry(node.attr(), self.ttl_s, self.ttl_s)

    async def _asked(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.blocking:
            await self.loop.lane(partial(time.sleep, self.delay_s))

    # -- Filesystem

    def start(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self.started += 1

    async def stop(self) -> None:
        self.stopped += 1

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        await self._asked("lookup")
        node = self._child(parent, name)
        return Entry(None, self.ttl_s) if node is None else self._entry(node)

    def forget(self, ino: Ino, nlookup: int) -> None:
        self.calls["forget"] += 1
        self.lookups[ino] -= nlookup

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply:
        await self._asked("getattr")
        return AttrReply(self._node(ino).attr(), self.ttl_s)

    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply:
        await self._asked("setattr")
        node = self._node(ino)
        if changes.size is not None:
            self._resize(node, changes.size)
        return AttrReply(node.attr(), self.ttl_s)

    def _resize(self, node: Node, size: int) -> None:
        if size > 1 << 30:
            raise FSError(errno.EFBIG)
        del node.content[size:]
        node.content.extend(bytes(size - len(node.content)))

    async def readlink(self, ino: Ino) -> bytes:
        await self._asked("readlink")
        return self._node(ino).target

    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        await self._asked("mknod")
        self._free(parent, name)
        return self._entry(self.make(parent, name, mode))

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        await self._asked("mkdir")
        self._free(parent, name)
        return self._entry(self.make(parent, name, stat.S_IFDIR | mode))

    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        await self._asked("unlink")
        node = self._child(parent, name)
        if node is None:
            raise FSError(errno.ENOENT)
        del self.nodes[parent].children[name]
        node.nlink -= 1

    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        await self._asked("rmdir")
        node = self._child(parent, name)
        if node is None:
            raise FSError(errno.ENOENT)
        if node.children:
            raise FSError(errno.ENOTEMPTY)
        del self.nodes[parent].children[name]

    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        await self._asked("symlink")
        self._free(parent, name)
        node = self.make(parent, name, stat.S_IFLNK | 0o777)
        node.target = target
        return self._entry(node)

    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        await self._asked("rename")
        node = self._child(parent, name)
        if node is None:
            raise FSError(errno.ENOENT)
        if self._child(new_parent, new_name) is not None and flags & 1:
            raise FSError(errno.EEXIST)
        del self.nodes[parent].children[name]
        self.nodes[new_parent].children[new_name] = node.ino
        node.parent = new_parent

    async def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Entry:
        await self._asked("link")
        node = self._node(ino)
        self._free(new_parent, new_name)
        node.nlink += 1
        self.nodes[new_parent].children[new_name] = ino
        return self._entry(node)

    def _opened(self, ino: Ino) -> OpenReply:
        self._next += 1
        self.open_handles.add(self._next)
        return OpenReply(Fh(self._next), keep_cache=self.keep_cache, passthrough_fd=self.passthrough_fd(ino))

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply:
        await self._asked("open")
        node = self._node(ino)
        if request.flags & os.O_TRUNC:
            self._resize(node, 0)
        return self._opened(ino)

    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        await self._asked("create")
        node = self._child(parent, name)
        if node is not None and request.flags & os.O_EXCL:
            raise FSError(errno.EEXIST)
        node = node or self.make(parent, name, stat.S_IFREG | stat.S_IMODE(mode))
        return self._entry(node), self._opened(node.ino)

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> bytes | bytearray | memoryview:
        await self._asked("read")
        return memoryview(self._node(ino).content)[offset : offset + size].tobytes()

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        await self._asked("write")
        node = self._node(ino)
        if offset + len(payload) > 1 << 30:
            raise FSError(errno.EFBIG)
        if offset > len(node.content):
            node.content.extend(bytes(offset - len(node.content)))
        node.content[offset : offset + len(payload)] = payload
        return len(payload)

    async def flush(self, ino: Ino, fh: Fh) -> None:
        await self._asked("flush")

    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None:
        await self._asked("fsync")

    async def release(self, ino: Ino, fh: Fh) -> None:
        await self._asked("release")
        self.open_handles.discard(fh)

    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        await self._asked("fallocate")

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply:
        await self._asked("opendir")
        return OpenDirReply(self._opened(ino).fh)

    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        await self._asked("readdirplus" if plus else "readdir")
        node = self._node(ino)
        dots = [(b".", node.ino), (b"..", node.parent)]
        lines: list[DirEntry] = []
        for cursor, (name, child) in enumerate([*dots, *node.children.items()][offset:], offset + 1):
            if not budget.take(len(name)):
                break
            entry = self._entry(self.nodes[child]) if plus and cursor > 2 else None
            lines.append(DirEntry(name, child, self._node(child).mode, cursor, entry))
        return lines

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        self.calls["releasedir"] += 1
        self.open_handles.discard(fh)

    async def statfs(self, ino: Ino) -> StatFs:
        await self._asked("statfs")
        return StatFs(1 << 20, 1 << 19, 1 << 16, 1 << 15)

    async def getxattr(self, ino: Ino, name: bytes) -> bytes:
        await self._asked("getxattr")
        found = self._node(ino).xattrs.get(name)
        if found is None:
            raise FSError(errno.ENODATA)
        return found

    async def setxattr(self, caller: Caller, ino: Ino, name: bytes, content: bytes, flags: int) -> None:
        await self._asked("setxattr")
        xattrs = self._node(ino).xattrs
        if flags & os.XATTR_CREATE and name in xattrs:
            raise FSError(errno.EEXIST)
        xattrs[name] = content

    async def listxattr(self, ino: Ino) -> Sequence[bytes]:
        await self._asked("listxattr")
        return list(self._node(ino).xattrs)

    async def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        await self._asked("removexattr")
        if self._node(ino).xattrs.pop(name, None) is None:
            raise FSError(errno.ENODATA)


EVERY_CALL = [name for name in vars(MemFs) if not name.startswith("_")]


@dataclass
class MemMount:
    """What a builder gives the mount server (datastore.fuse.server.MountedStore)."""

    filesystem: MemFs
    failures: list[str]

    def status(self) -> dict[str, object]:
        return {"files": len(self.filesystem.nodes), "dirty": []}

    def warm(self, path: str, progress: Callable[[dict[str, object]], None]) -> dict[str, object]:
        for done in (1, 2, 3):
            progress({"path": path, "done": done, "total": 3})
        return {"files": 3}

    def apply(self, spec: MountSpec) -> dict[str, object]:
        return {"later": []}

    def flush_all(self) -> list[str]:
        return list(self.failures)


def build(spec: MountSpec, *, resumed: bool = False) -> MemMount:
    """Build a mount by its labels: wrong=key (the probe fails), broken while=FILE (it fails while FILE exists),
    defect=1 (a RuntimeError), flush=LINE (flush_all reports LINE as unsent), delay=SECONDS (of each read), blocking=all
    (every call waits in a lane), local=FILE (d/000 is FILE, by passthrough), kernel=old (it has nothing of 6.9)."""
    if spec.labels.get("wrong") == "key" or os.path.exists(spec.labels.get("broken while", "")):
        raise CredentialsInvalid("the key AKIAEXAMPLE is unknown to the server")
    if "defect" in spec.labels:
        raise RuntimeError("a defect in the builder")
    if "kernel" in spec.labels:
        for feature in (abi.HAS_RESEND, abi.PASSTHROUGH):
            FEATURES.pop(feature, None)
    delay_s = float(spec.labels.get("delay", "0"))
    blocking = EVERY_CALL if "blocking" in spec.labels else ["read"] if delay_s else []
    filesystem = MemFs(ttl_s=0.0 if delay_s else 1.0, keep_cache=False, delay_s=delay_s, blocking=blocking)
    filesystem.populate()
    if "local" in spec.labels:
        fd = os.open(spec.labels["local"], os.O_RDWR)
        filesystem.passthrough_fd = lambda ino: fd if ino == 1000 else -1
    return MemMount(filesystem, [spec.labels["flush"]] if "flush" in spec.labels else [])
