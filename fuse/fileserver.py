"""What mounts of another machine's file system share, NFS exports and directories of SSH servers alike.

That machine decides everything and has every byte: nothing is fetched ahead or sent later, and of what a mount is told
while it stands only the time to live and the group mean anything.

Threads: a call begins on the loop, and what asks that machine runs in a lane, so that what is kept here has a lock. The
lock is never held while that machine is waited for.
"""

from __future__ import annotations

import errno
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from datastore.api.mountspec import MountSpec
from datastore.errors import Unsupported
from datastore.logs import Limiter, fields

from .loop import Loop
from .ops import ROOT_INO, FSError, Held, Ino, Notifier
from .state.nodelog import NodeLog, NodeRecord
from .store.metrics import StoreMetrics

log = logging.getLogger(__name__)

NAME_MAX = 255
END_S = 20.0
"""How long the end of a mount waits for a server that does not answer."""
BASE_BYTES = 128 << 20
"""Of the mount's process without any node, and with as many uncommitted bytes as there may be."""
NODE_BYTES = 640
"""Of one node with its places in the tables, measured."""
LOG_SLACK = 10_000
_LIVE = (
    "cache_size_bytes", "capacity_bytes", "conflict", "group", "metadata_ttl_s", "used_bytes", "used_files",
    "write_back_s",
)  # fmt: skip
"""The fields of MountSpec that change while it is mounted; most mean nothing here."""


def ttl_of(spec: MountSpec) -> float:
    """How long the kernel may believe what it is told. libfuse takes one time for all answers, of which the other half
    is what it takes to ask."""
    return spec.metadata_ttl_s / 2 if spec.transport == "libfuse" else spec.metadata_ttl_s


def nodes_within(memory_bytes: int) -> int:
    """How many nodes a process may know that has so much memory."""
    return max(memory_bytes - BASE_BYTES, memory_bytes // 4) // NODE_BYTES


class KnownNode:
    """What the kernel knows by a number. kind: a file type, as stat.S_IFREG; opens: how many there are."""

    __slots__ = ("ino", "kind", "nlookup", "opens")

    def __init__(self, ino: Ino, kind: int) -> None:
        self.ino = ino
        self.kind = kind
        self.nlookup = 0
        self.opens = 0


N = TypeVar("N", bound=KnownNode)


class KnownNodes(Generic[N]):
    """All that the kernel knows. It outlives the server process in a log (state.nodelog). Not locked: the file system's
    lock covers it. limit: how many there may be before the kernel is asked to give some up.
    """

    def __init__(self, log: NodeLog, limit: int) -> None:
        self.by_ino: dict[int, N] = {}
        self._log = log
        self._limit = limit
        self._dropped: list[int] = []
        """Given up; it is written down with the next node."""

    def get(self, ino: int) -> N:
        """Errors: ESTALE for one that is not known."""
        node = self.by_ino.get(ino)
        if node is None:
            raise FSError(errno.ESTALE)
        return node

    def forget(self, ino: int, nlookup: int) -> None:
        """The kernel has given up so many lookups."""
        node = self.by_ino.get(ino)
        if node is not None:
            node.nlookup -= nlookup
            self.let_go(node)

    def let_go(self, node: N) -> None:
        """Drop a node that nothing needs any more."""
        raise NotImplementedError

    def surplus(self) -> Sequence[Held]:
        """Nodes to ask the kernel for, the oldest that nobody has open, when there are more than the limit."""
        return list(self._oldest(len(self.by_ino) - self._limit)) if len(self.by_ino) > self._limit else ()

    def _oldest(self, count: int) -> Iterator[Held]:
        for node in list(self.by_ino.values())[: 2 * count]:
            if not node.opens and node.kind != stat.S_IFDIR:
                yield Held(node.ino, ROOT_INO, b"")

    def _told(self, nodes: list[N], new: list[N]) -> list[N]:
        """The kernel is told these: each has one lookup more, and those that are new are written down before."""
        if new:
            try:
                self._write(new)
            except OSError:
                for node in new:
                    self._remove(node)
                raise
        for node in nodes:
            node.nlookup += 1
        return nodes

    def _write(self, nodes: Iterable[N]) -> None:
        self._log.append(self._records(nodes), self._dropped)
        self._dropped = []
        if self._log.records > 2 * len(self.by_ino) + LOG_SLACK:
            self._log.rewrite(self._records(self.by_ino.values()))

    def _remove(self, node: N) -> None:
        raise NotImplementedError

    def _records(self, nodes: Iterable[N]) -> list[NodeRecord]:
        """What the log says of them."""
        raise NotImplementedError


class _Server(Protocol):
    """What a file system knows of its connection."""

    metrics: StoreMetrics
    reconnects: int

    @property
    def location(self) -> object: ...


class FileServerFilesystem:
    """The part of ops.Filesystem that is the same for all. group: everything is shown as of this group, which may do
    what the owner may; None: as it is."""

    def __init__(self, nodes: KnownNodes[Any], server: _Server, *, loop: Loop, ttl_s: float, group: int | None) -> None:
        self.loop = loop
        self.group = group
        self.server = server
        self._nodes = nodes
        self._lock = threading.Condition()
        self._ttl_s = ttl_s
        self._notifier = Notifier()
        self._limiter = Limiter()

    def status(self) -> dict[str, object]:
        """What `datastore status` shows of this side. dirty: what a host that is away may have forgotten."""
        storage = self.server.metrics.silence.told()
        kept = self.uncommitted() if storage else []
        return {
            "location": str(self.server.location),
            "dirty": [{"path": f"inode {ino}", "bytes": size, "error": storage["error"]} for ino, size in kept],
            "store": self.server.metrics.snapshot(),
            "storage": storage,
            "reconnects": max(0, self.server.reconnects),
            "nodes": len(self._nodes.by_ino),
        }

    def uncommitted(self) -> list[tuple[int, int]]:
        """(inode, bytes) that the server has not committed yet, as far as this process wrote them."""
        return []

    def flush_all(self) -> list[str]:
        """Have the server commit what it has taken; one line for each file that it did not."""
        return []

    def change(self, ttl_s: float, group: int | None) -> None:
        """Tell the kernel this time to live from now on, and show everything as of this group."""
        with self._lock:
            same, self.group, self._ttl_s = group == self.group, group, ttl_s
            inos = [] if same else list(self._nodes.by_ino)
        for ino in inos:
            self._notifier.inval_inode(Ino(ino), -1)

    async def stop(self) -> None:
        """See ops.Filesystem. In no lane: all may be waiting for a machine that does not answer."""
        await self.loop.aside(self._end, "end")

    def _end(self) -> None:
        """Leave nothing behind, within about END_S; idempotent."""
        raise NotImplementedError

    def forget(self, ino: Ino, nlookup: int) -> None:
        """See ops.Filesystem."""
        with self._lock:
            self._nodes.forget(ino, nlookup)

    def _at_most(self, size: int, content: bytes) -> bytes:
        """The answer to READ for so many bytes. Errors: FSError when it is longer, which the kernel would not take."""
        if len(content) <= size:
            return content
        if self._limiter.allows("read", time.monotonic()):
            told = fields(asked=size, came=len(content), answer="EIO")
            log.error("the server answers READ with more than was asked for", extra=told)
        raise FSError(errno.EIO)

    def _shown(self, mode: int, gid: int) -> tuple[int, int]:
        """Mode and group as the kernel is told them."""
        if self.group is None or stat.S_ISLNK(mode):
            return mode, gid
        mode |= (mode & stat.S_IRWXU) >> 3
        return mode | (stat.S_ISGID if stat.S_ISDIR(mode) else 0), self.group

    # -- what NFS 3 and SFTP do not have: the kernel does it by itself where it can, and does not ask again

    async def _not_supported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FSError(errno.ENOSYS)

    fallocate = lseek = getxattr = setxattr = listxattr = removexattr = _not_supported


class MountedFileServer:
    """See fuse.server.MountedStore."""

    def __init__(self, filesystem: FileServerFilesystem, spec: MountSpec) -> None:
        self.filesystem = filesystem
        self._spec = spec
        self.status = filesystem.status
        self.flush_all = filesystem.flush_all

    def apply(self, spec: MountSpec) -> list[str]:
        """See MountedStore. How large and how full it is, the server says."""
        live: dict[str, object] = {name: getattr(spec, name) for name in _LIVE}
        self._spec = replace(self._spec, **live)  # type: ignore[arg-type]
        self.filesystem.change(ttl_of(spec), spec.group)
        return [
            each.name for each in fields_of(MountSpec) if getattr(self._spec, each.name) != getattr(spec, each.name)
        ]

    def warm(self, path: str, progress: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """Errors: Unsupported, always."""
        raise Unsupported(
            f"a mount of {self._spec.source} keeps no files on this machine's disk, so there is nothing to fetch ahead"
        )

    def discard(self, path: str) -> int:
        """Nothing: what could not be written was refused when it was."""
        return 0
