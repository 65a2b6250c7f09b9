"""What mounts of NFS exports and mounts of an SSH server's directories (SFTP) have in common.

The server has every byte and decides everything: there is no prefetch and no write-back, and of the settings that can
change while a mount stands only the TTL and the group have an effect.

Threads: a call begins on the loop, and a request to the server runs in a lane (a thread), so the nodes have a lock.
"""

from __future__ import annotations

import errno
import functools
import logging
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, Concatenate, Generic, NamedTuple, NoReturn, ParamSpec, Protocol, Self, TypeVar

from datastore.api.mountspec import MountSpec
from datastore.errors import StoreError, Unsupported
from datastore.logs import Limiter, fields

from .loop import Loop
from .ops import ROOT_INO, Attr, Caller, Entry, FSError, Held, Ino, Notifier
from .state.nodelog import NodeLog, NodeRecord
from .store.metrics import StoreMetrics

log = logging.getLogger(__name__)

NAME_MAX = 255
END_S = 20.0
"""How long the end of a mount waits for a file server that does not answer."""
BASE_BYTES = 128 << 20
"""The memory of a mount's process without any node, but with as many uncommitted bytes as are allowed."""
NODE_BYTES = 640
"""The memory of a node with its entries in the tables, measured."""
LOG_SLACK = 10_000


def nodes_within(memory_bytes: int) -> int:
    """Return how many nodes a process with this much memory may keep."""
    return max(memory_bytes - BASE_BYTES, memory_bytes // 4) // NODE_BYTES


class KnownNode:
    """An inode that the kernel knows. kind: its file type, as stat.S_IFREG; opens: how many times it is open."""

    __slots__ = ("ino", "kind", "nlookup", "opens")

    def __init__(self, ino: Ino, kind: int) -> None:
        self.ino = ino
        self.kind = kind
        self.nlookup = 0
        self.opens = 0


N = TypeVar("N", bound=KnownNode)


class KnownNodes(Generic[N]):
    """All inodes that the kernel knows; a log (state.nodelog) keeps them for the next server process. limit: with more
    nodes than this the kernel is asked to forget some. lock: the methods that change something take it, and so do
    callers around steps that belong together; no thread holds it while it waits for the server.
    """

    def __init__(self, log: NodeLog, limit: int) -> None:
        self.lock = threading.Condition()
        self.by_ino: dict[int, N] = {}
        self.notifier = Notifier()
        self._log = log
        self._limit = limit
        self._dropped: list[int] = []
        """Inodes that the kernel has forgotten; they are logged together with the next new node."""

    def get(self, ino: int) -> N:
        """Errors: ESTALE for an inode that is not known."""
        node = self.by_ino.get(ino)
        if node is None:
            raise FSError(errno.ESTALE)
        return node

    def forget(self, ino: int, nlookup: int) -> None:
        """Take nlookup from an inode's lookup count, because the kernel says so; an unknown inode is ignored."""
        with self.lock:
            node = self.by_ino.get(ino)
            if node is not None:
                node.nlookup -= nlookup
                self.let_go(node)

    def let_go(self, node: N) -> None:
        """Drop the node if nothing needs it any more. The caller holds the lock."""
        raise NotImplementedError

    def _told(self, nodes: list[N], new: list[N]) -> list[N]:
        """Log the nodes that are new, then add one to each node's lookup count, before the kernel is told of them. When
        there are more nodes than the limit, ask it to forget old ones that are not open."""
        if new:
            try:
                self._write(new)
            except OSError:
                for node in new:
                    self._remove(node)
                raise
        for node in nodes:
            node.nlookup += 1
        oldest = islice(self.by_ino.values(), max(0, 2 * (len(self.by_ino) - self._limit)))
        unused = [node.ino for node in oldest if not node.opens and node.kind != stat.S_IFDIR]
        if unused:
            self.notifier.release([Held(ino, ROOT_INO, b"") for ino in unused])
        return nodes

    def _write(self, nodes: Iterable[N]) -> None:
        self._log.append(self._records(nodes), self._dropped)
        self._dropped = []
        if self._log.records > 2 * len(self.by_ino) + LOG_SLACK:
            self._log.rewrite(self._records(self.by_ino.values()))

    def _remove(self, node: N) -> None:
        raise NotImplementedError

    def _records(self, nodes: Iterable[N]) -> list[NodeRecord]:
        """Return the log's records for these nodes."""
        raise NotImplementedError


class _HasLoop(Protocol):
    loop: Loop


S = TypeVar("S", bound=_HasLoop)
P = ParamSpec("P")
R = TypeVar("R")


def in_lane(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Make a coroutine of a method that waits for the server: a lane runs the method."""

    @functools.wraps(call)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.loop.lane(call, self, *args, **kwargs)

    return run


def removed(name: bytes, remove: Callable[[], object]) -> bool:
    """Remove a hidden name by `remove`. Return False if that failed and the name stays on the server."""
    try:
        remove()
    except (OSError, StoreError) as error:
        if getattr(error, "errno", None) != errno.ENOENT:
            log.warning("a removed file keeps its other name", extra=fields(path=name, error=error))
            return False
    return True


class _Server(Protocol):
    """What FileServerFilesystem needs of the connection to a file server."""

    metrics: StoreMetrics
    reconnects: int

    @property
    def location(self) -> object: ...


class Kept(NamedTuple):
    """A file of which the server has not stored all that programs wrote, which is only in this process's memory.

    path: below the mount, or `inode N`; since: Unix time of the oldest of these writes; error: why the server has
    refused to store them, or ''.
    """

    path: str
    bytes: int
    since: float
    error: str


class FileServerFilesystem:
    """The part of ops.Filesystem and of fuse.server.MountedStore that NFS and SFTP share."""

    def __init__(self, nodes: KnownNodes[Any], server: _Server, spec: MountSpec, loop: Loop) -> None:
        self.loop = loop
        self.server = server
        self._nodes = nodes
        self._spec = spec
        self._notifier = Notifier()
        self._limiter = Limiter()
        self.forget = nodes.forget

    def start(self, notifier: Notifier) -> None:
        self._notifier = self._nodes.notifier = notifier

    @property
    def filesystem(self) -> Self:
        return self

    def status(self) -> dict[str, object]:
        """Return what `datastore status` shows. dirty: see unstored(); inMemory: the sum of these bytes, as they are on
        no disk here."""
        storage = self.server.metrics.silence.told()
        kept = self.unstored(silent=bool(storage))
        return {
            "location": str(self.server.location),
            "dirty": [{**each._asdict(), "error": each.error or storage.get("error", "")} for each in kept],
            "inMemory": sum(each.bytes for each in kept),
            "store": self.server.metrics.snapshot(),
            "storage": storage,
            "reconnects": max(0, self.server.reconnects),
            "nodes": len(self._nodes.by_ino),
        }

    def unstored(self, *, silent: bool) -> list[Kept]:
        """Return the files that the server refused to store or, if it does not answer, has not stored."""
        return []

    def flush_all(self) -> list[str]:
        """Have the server commit all that it has received; return one line for each file for which that failed."""
        return []

    def apply(self, spec: MountSpec) -> dict[str, object]:
        """The capacity and the used space are the server's, not the specification's."""
        regroup = spec.group != self._spec.group
        self._spec = self._spec.with_live(spec)
        if regroup:
            with self._nodes.lock:
                inos = list(self._nodes.by_ino)
            for ino in inos:
                self._notifier.inval_inode(Ino(ino), -1)
        return {"later": self._spec.differences(spec)}

    def warm(self, path: str, progress: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """Errors: Unsupported, always."""
        raise Unsupported(
            f"a mount of {self._spec.source} keeps no files on this machine's disk, so there is nothing to fetch ahead"
        )

    def discard(self, path: str) -> int:
        """Return 0: nothing is kept that could be discarded, because a failed write is reported at once."""
        return 0

    async def stop(self) -> None:
        """This runs in a thread of its own: all lanes may be waiting for a dead server."""
        await self.loop.aside(self._end, "end")

    def _end(self) -> None:
        """Finish the work with the server and close the connection, within about END_S; idempotent."""
        raise NotImplementedError

    @in_lane
    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        """The kernel looks up each name first, so a name that is too long gets no further."""
        if len(name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        try:
            return self._lookup(caller, self._nodes.get(parent), name)
        except FSError as error:
            if error.errno != errno.ENOENT:
                raise
            return Entry(None, self._spec.believed_s)

    def _lookup(self, caller: Caller, directory: Any, name: bytes) -> Entry:
        """Errors: ENOENT."""
        raise NotImplementedError

    def _entry(self, attr: Attr) -> Entry:
        ttl_s = self._spec.believed_s
        return Entry(attr, ttl_s, ttl_s)

    def _at_most(self, size: int, content: bytes) -> bytes:
        """Return the answer to a READ of `size` bytes. Errors: FSError when it is longer: the kernel refuses that."""
        if len(content) <= size:
            return content
        if self._limiter.allows("read", time.monotonic()):
            told = fields(asked=size, came=len(content), answer="EIO")
            log.error("the server answers READ with more than was asked for", extra=told)
        raise FSError(errno.EIO)

    def _shown(self, mode: int, gid: int) -> tuple[int, int]:
        """Return the mode and the group for the kernel."""
        group = self._spec.group
        if group is None or stat.S_ISLNK(mode):
            return mode, gid
        mode |= (mode & stat.S_IRWXU) >> 3
        return mode | (stat.S_ISGID if stat.S_ISDIR(mode) else 0), group

    # -- what NFS 3 and SFTP do not have: after ENOSYS the kernel emulates it where it can, and does not ask again

    async def _not_supported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FSError(errno.ENOSYS)

    fallocate = getxattr = setxattr = listxattr = removexattr = _not_supported
